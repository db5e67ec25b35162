"""`make bench-learner`: what a whole optimizer step costs, beside what the model alone would take.

Tokens per second of pack, forward, backward and update, by turns with the same model's forward and backward passes on
full rows, and with those on the same data padded; how a step's time splits; the memory of log-probabilities in chunks.
docs/benchmarks.md says how. On a GPU the models are those of 0.5B and 1.5B.
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

from common.config import OptimConfig
from common.objective_config import ObjectiveConfig
from learner.clock import Clock
from learner.model.packed_model import PackedModel, full_tensors, load_model
from learner.model.optimizer import make_optimizer, make_schedule
from learner.pack import Packed, TokenSequence, count_loss_tokens, count_sequences, micro_batches
from learner.ranks import Ranks, join_ranks, leave_ranks
from learner.step import train_step
from tools.bench import benchmark
from tools.bench.logprobs import memory_row
from tools.bench.benchmark import Row
from tools.bench.learner_limits import (
    Rows,
    forward_and_backward,
    full_rows,
    length_around_a_token,
    mean_length,
    padded_rows,
    to,
)
from tools.bench.learner_load import (
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

NUM_REPEATS = 11  # of a small model; a larger one has fewer
CHUNK_TOKENS = 1024
# Dense bfloat16, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One model twice: as the learner trains it, and as transformers has it."""

    size: Size
    ranks: Ranks
    model: PackedModel
    plain: PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    weights: dict[str, torch.Tensor]  # where a publisher would take them from

    def packs(self, batch: list[TokenSequence]) -> list[Packed]:
        return micro_batches(batch, max_tokens=self.size.micro_batch_tokens, num_ranks=1, rank=0)

    def train(self, batch: list[TokenSequence], packs: list[Packed], clock: Clock | None = None) -> None:
        train_step(
            self.model,
            self.optimizer,
            self.schedule,
            packs,
            reference=None,
            ranks=self.ranks,
            objective=ObjectiveConfig(),
            global_num_loss_tokens=count_loss_tokens(batch),
            global_num_sequences=count_sequences(batch),
            temperature=1.0,
            chunk_tokens=CHUNK_TOKENS,
            max_grad_norm=1.0,
            clock=clock,
        )

    def timed(self, batch: list[TokenSequence]) -> dict[str, float]:
        """Seconds of each part of a step that is published; they add up to all of it."""
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
    """Measure, print, and write docs/benchmarks/learner.json; return 0 when every goal holds, else 1."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
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
    """Everything about one model."""
    with tempfile.TemporaryDirectory(prefix="bench-learner-") as folder:
        stage = make_stage(save_model(Path(folder), size), size, ranks)
    for mix in (UNIFORM, LONG_TAIL, FEW_LONG):
        yield from speed_rows(stage, mix, num_repeats=num_repeats)
    yield from time_rows(stage, LONG_TAIL, num_repeats=num_repeats)


def make_stage(folder: Path, size: Size, ranks: Ranks) -> Stage:
    model = load_model(folder, ranks=ranks, dtype=size.dtype, activation_checkpointing=False)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, size.dtype), attn_implementation="sdpa"
    )  # fmt: skip
    optim = OptimConfig(lr=1e-6)
    optimizer = make_optimizer(model, config=optim)
    return Stage(
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


def speed_rows(stage: Stage, mix: Mix, *, num_repeats: int) -> Iterator[Row]:
    """Real tokens per second of whole steps, beside full rows and beside a padded batch."""
    size, batch = stage.size, a_batch(stage.size, mix)
    num_tokens = sum(sequence.num_tokens for sequence in batch)
    full, short = (
        full_rows(batch, length=length, max_tokens=size.micro_batch_tokens, vocab_size=size.vocab_size)
        for length in (length_around_a_token(batch), mean_length(batch))
    )
    padded = padded_rows(batch, max_tokens=size.micro_batch_tokens)
    ours = (num_tokens, lambda: stage.train(batch, stage.packs(batch)))
    steps, limits, short_limits = by_turns(
        ours,
        (_num_tokens(full), lambda: _plainly(stage, full)),
        (_num_tokens(short), lambda: _plainly(stage, short)),
        num_repeats=num_repeats,
    )
    steps_again, paddeds = by_turns(ours, (num_tokens, lambda: _plainly(stage, padded)), num_repeats=3)
    what = f"{size.name}, {mix.name}: whole step"
    yield Row.of(
        f"{what}, against forward and backward of full rows", steps, unit="tokens/s", against=limits,
        goal="ratio >= 0.9",
    )  # fmt: skip
    yield Row.of(
        f"{what}, beside forward and backward of full rows of the mean length", steps, unit="tokens/s",
        against=short_limits,
    )  # fmt: skip
    yield Row.of(
        f"{what}, beside forward and backward of a padded batch", steps_again, unit="tokens/s", against=paddeds,
        goal="" if mix is UNIFORM else "ratio >= 2.5",
    )  # fmt: skip
    peak = [flops for name, flops in PEAK_FLOPS.items() if torch.cuda.is_available() and name in gpu_name()]
    if peak:
        num_weights = sum(weight.numel() for weight in stage.plain.parameters())
        yield Row.of(
            f"{what}, MFU on real tokens (6 x weights, without attention), of peak",
            [6 * num_weights * tokens_per_s for tokens_per_s in steps],
            unit="FLOP/s",
            against=[peak[0]] * len(steps),
        )


def by_turns(*sides: tuple[int, Callable[[], None]], num_repeats: int) -> list[list[float]]:
    """Tokens per second of each side, given its tokens and its work, in every repeat; forth and back."""
    speeds: list[list[float]] = [[] for _ in sides]
    for repeat in range(num_repeats + 1):
        order = list(range(len(sides)))
        for side in order if repeat % 2 else order[::-1]:
            num_tokens, work = sides[side]
            speed = num_tokens / seconds(work)
            if repeat:  # the first warms up
                speeds[side].append(speed)
    return speeds


def time_rows(stage: Stage, mix: Mix, *, num_repeats: int) -> Iterator[Row]:
    """Where a step's wall clock goes; the parts add up to it. There are no actors here, and so no wait."""
    batch = a_batch(stage.size, mix)
    splits = []
    for repeat in range(num_repeats + 1):
        split = stage.timed(batch)
        if repeat:
            splits.append(split)
    wholes = [1e3 * sum(split.values()) for split in splits]
    for part in splits[0]:
        yield Row.of(
            f"{stage.size.name}, {mix.name}: {part}, of a step with its publish copy",
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


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def _num_tokens(rows: list[Rows]) -> int:
    return sum(part.tokens.numel() for part in rows)


def _plainly(stage: Stage, rows: list[Rows]) -> None:
    forward_and_backward(stage.plain, to(rows, stage.ranks.device))


if __name__ == "__main__":
    sys.exit(main())
