"""`make bench-learner`: measure a whole optimizer step against the time of the model alone.

It measures tokens per second of pack, forward, backward and update, alternately with the forward and backward passes of
the same model on full rows and on the same data padded. It also measures how the time of a step splits, and the memory
of log-probabilities in chunks. docs/benchmarks.md has the method. On a GPU the models have 0.5B and 1.5B weights.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.log import log_to_stderr
from slipstream.learner.batch.pack import Packed, TokenSequence, count_loss_tokens, count_trajectories, micro_batches
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks, join_ranks, leave_ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.learner_limits import (
    Rows,
    forward_and_backward,
    full_rows,
    length_around_a_token,
    padded_rows,
    to,
)
from slipstream.tools.lab.bench.load.learner_load import (
    FEW_LONG,
    HALF_B,
    LARGER,
    LONG_TAIL,
    ONE_AND_A_HALF_B,
    QUICKSTART,
    UNIFORM,
    Mix,
    Size,
    save_model,
    sequences,
)
from slipstream.tools.lab.bench.logprobs import memory_row

NUM_REPEATS = 11  # for a small model; a larger one has fewer
# Dense bfloat16, from NVIDIA's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPair:
    """One model twice: as the learner trains it, and as transformers runs it."""

    size: Size
    ranks: Ranks
    model: PackedModel
    plain: PreTrainedModel
    optimizer: torch.optim.AdamW
    schedule: torch.optim.lr_scheduler.LambdaLR
    weights: dict[str, torch.Tensor]  # a publisher would read them from here

    def packs(self, batch: list[TokenSequence]) -> list[Packed]:
        return micro_batches(batch, max_tokens=self.size.micro_batch_tokens, num_ranks=1, rank=0)

    def train(self, batch: list[TokenSequence], packs: list[Packed], clock: Clock | None = None) -> None:
        train_step(
            StepModels(policy=self.model, optimizer=self.optimizer, schedule=self.schedule),
            StepBatch(
                micro_batches=packs,
                num_loss_tokens=count_loss_tokens(batch),
                num_trajectories=count_trajectories(batch),
            ),
            settings=StepSettings(objective=ObjectiveConfig(), max_grad_norm=1.0),
            ranks=self.ranks,
            clock=clock,
        )

    def timed(self, batch: list[TokenSequence]) -> dict[str, float]:
        """Seconds of each part of a published step; they add up to the whole step."""
        clock = Clock(self.ranks.device)
        packs = self.packs(batch)
        clock.lap("pack")
        self.train(batch, packs, clock)
        self.publish_copy()
        clock.lap("publish copy")
        return clock.take()

    def publish_copy(self) -> None:
        with torch.no_grad():
            for name, tensor in full_tensors(self.model):
                self.weights[name].copy_(tensor)


def main() -> int:
    """Measure, print, and write docs/benchmarks/learner.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.ERROR)
    measuring = benchmark.Run("learner")
    ranks = join_ranks(timeout_s=60)
    rows = [memory_row(ranks.device)]
    sizes = (HALF_B, ONE_AND_A_HALF_B) if ranks.device.type == "cuda" else (QUICKSTART, LARGER)
    for size in sizes:
        rows += rows_of(size, ranks, num_repeats=NUM_REPEATS if size is QUICKSTART else 3)
    leave_ranks()
    return measuring.end(
        rows,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        versions={"torch": str(torch.__version__)},
    )


def rows_of(size: Size, ranks: Ranks, *, num_repeats: int) -> Iterator[Row]:
    """All measurements of one model."""
    with tempfile.TemporaryDirectory(prefix="bench-learner-") as folder:
        pair = make_pair(save_model(Path(folder), size), size, ranks)
    for mix in (UNIFORM, LONG_TAIL, FEW_LONG):
        yield from speed_rows(pair, mix, num_repeats=num_repeats)
    yield from time_rows(pair, LONG_TAIL, num_repeats=num_repeats)


def make_pair(folder: Path, size: Size, ranks: Ranks) -> ModelPair:
    settings = ModelSettings(dtype=size.dtype, temperature=1.0)
    model = load_model(folder, ranks=ranks, settings=settings)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, size.dtype), attn_implementation="sdpa", trust_remote_code=False
    )
    optim = OptimConfig(lr=1e-6)
    optimizer = make_optimizer(model, config=optim)
    return ModelPair(
        size=size,
        ranks=ranks,
        model=model,
        plain=plain.to(ranks.device).eval(),
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=optim, num_steps=1000),
        weights={name: torch.empty(tensor.shape) for name, tensor in full_tensors(model)},
    )


def a_batch(size: Size, mix: Mix) -> list[TokenSequence]:
    lengths = mix.draw(np.random.default_rng(1), size.num_sequences) * size.times_as_long
    return sequences(lengths, vocab_size=size.vocab_size)


def speed_rows(pair: ModelPair, mix: Mix, *, num_repeats: int) -> Iterator[Row]:
    """Real tokens per second of whole steps, against full rows and against a padded batch."""
    size, batch = pair.size, a_batch(pair.size, mix)
    num_tokens = sum(sequence.num_tokens for sequence in batch)
    length = length_around_a_token(batch)
    full = full_rows(batch, length=length, max_tokens=size.micro_batch_tokens, vocab_size=size.vocab_size)
    padded = padded_rows(batch, max_tokens=size.micro_batch_tokens)
    ours = (num_tokens, lambda: pair.train(batch, pair.packs(batch)))
    steps, limits = by_turns(ours, (_num_tokens(full), lambda: _plainly(pair, full)), num_repeats=num_repeats)
    steps_again, paddeds = by_turns(ours, (num_tokens, lambda: _plainly(pair, padded)), num_repeats=3)
    what = f"{size.name}, {mix.name}: whole step"
    yield Row.of(f"{what}, against full rows", steps, unit="tokens/s", against=limits, goal="ratio >= 0.9")
    yield Row.of(
        f"{what}, beside a padded batch",
        steps_again,
        unit="tokens/s",
        against=paddeds,
        goal="" if mix is UNIFORM else "ratio >= 2.5",
    )
    peak = [
        flops
        for name, flops in PEAK_FLOPS.items()
        if torch.cuda.is_available() and name in torch.cuda.get_device_name()
    ]
    if peak:
        num_weights = sum(weight.numel() for weight in pair.plain.parameters())
        yield Row.of(
            f"{what}, MFU on real tokens (6 x weights, without attention), of peak",
            [6 * num_weights * tokens_per_s for tokens_per_s in steps],
            unit="FLOP/s",
            against=[peak[0]] * len(steps),
        )


def by_turns(*sides: tuple[int, Callable[[], None]], num_repeats: int) -> list[list[float]]:
    """Tokens per second of each side in every repeat; every second repeat has the sides in reverse order."""
    speeds: list[list[float]] = [[] for _ in sides]
    for repeat in range(num_repeats + 1):
        order = list(range(len(sides)))
        for side in order if repeat % 2 else order[::-1]:
            num_tokens, work = sides[side]
            speed = num_tokens / seconds(work)
            if repeat:  # the first warms up
                speeds[side].append(speed)
    return speeds


def time_rows(pair: ModelPair, mix: Mix, *, num_repeats: int) -> Iterator[Row]:
    """How the wall-clock time of a step splits into parts. Without actors, there is no wait."""
    batch = a_batch(pair.size, mix)
    splits = []
    for repeat in range(num_repeats + 1):
        split = pair.timed(batch)
        if repeat:
            splits.append(split)
    wholes = [1e3 * sum(split.values()) for split in splits]
    for part in splits[0]:
        yield Row.of(
            f"{pair.size.name}, {mix.name}: {part}, of a step with its publish copy",
            [1e3 * split[part] for split in splits],
            unit="ms",
            against=wholes,
        )


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _num_tokens(rows: list[Rows]) -> int:
    return sum(part.tokens.numel() for part in rows)


def _plainly(pair: ModelPair, rows: list[Rows]) -> None:
    forward_and_backward(pair.plain, to(rows, pair.ranks.device))


if __name__ == "__main__":
    sys.exit(main())
