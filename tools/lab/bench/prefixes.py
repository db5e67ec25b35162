"""`make bench-prefixes`: measure steps whose shared prefixes are computed once against steps of separate sequences.

Both train the same batch with the same model. On a CPU the CPU time is measured, which other load changes less than
the time that passes. Some batches of the first model share little, to find from where on it pays: see
`slipstream.learner.batch.pack.MIN_SAVED`. docs/benchmarks.md has the method. On a GPU the model has 0.5B weights.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from slipstream.common.process.log import log_to_stderr
from slipstream.learner.batch.pack import Packed, TokenSequence, numbered, pack
from slipstream.learner.batch.prefixes import lexicographic, runs_of, shared_lengths
from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.lab.bench.learner import ModelPair, gpu_name, make_pair
from slipstream.tools.lab.bench.load.learner_load import HALF_B, LARGER, LOSS_EVERY, QUICKSTART, Size, save_model

NUM_REPEATS = 7
NUM_REPEATS_LARGER = 3
LITTLE = (0.05, 0.1, 0.2, 0.3)  # shared fractions of the batches that share little
Tokens = npt.NDArray[np.int64]


def main() -> int:
    """Measure, print, and write docs/benchmarks/prefixes.json; return 0 if every goal holds, else 1."""
    log_to_stderr(logging.ERROR)
    measuring = benchmark.Run("prefixes")
    ranks = join_ranks(timeout_s=60)
    on_gpu = ranks.device.type == "cuda"
    rows: list[Row] = []
    for size in (HALF_B,) if on_gpu else (QUICKSTART, LARGER):
        with tempfile.TemporaryDirectory(prefix="bench-prefixes-") as folder:
            pair = make_pair(save_model(Path(folder), size), size, ranks)
        rows += rows_of(pair)
    leave_ranks()
    return measuring.end(rows, gpu=gpu_name() if on_gpu else "", versions={"torch": str(torch.__version__)})


def rows_of(pair: ModelPair) -> Iterator[Row]:
    """All measurements of one model."""
    size = pair.size
    for what, batch in batches(size).items():
        yield _row(pair, f"{size.name}, {what}", batch, goal="ratio >= 1.3")
    for fraction in () if size is LARGER else LITTLE:
        batch = siblings(8, prompt=round(fraction * 8 / 7 * 106), length=106, size=size)
        yield _row(pair, f"{size.name}, 8 groups of 8, {fraction:.0%} shared", batch, goal="")


def batches(size: Size) -> dict[str, list[TokenSequence]]:
    """The batches of which much is shared, by name."""
    return {
        "as in the quickstart: 8 groups of 8, 59 of 106 tokens shared": siblings(8, prompt=59, length=106, size=size),
        "a group of 8, 1,000 of 1,200 tokens shared": siblings(1, prompt=1000, length=1200, size=size),
        "a tree: 100 tokens, then 4 times 2 branches of 60": _numbered(_branches(size), size),
    }


def siblings(num_groups: int, *, prompt: int, length: int, size: Size) -> list[TokenSequence]:
    """Groups of 8 of which each shares a prompt."""
    rng = np.random.default_rng(1)
    prompt, length = prompt * size.times_as_long, length * size.times_as_long
    drawn = rng.integers(0, size.vocab_size, (num_groups, 8, length))
    drawn[:, :, :prompt] = drawn[:, :1, :prompt]
    return _numbered(list(drawn.reshape(-1, length)), size)


def shared_packs(batch: list[TokenSequence], *, max_tokens: int) -> list[Packed]:
    """The packs that share, even if it does not pay."""
    order = lexicographic([sequence.tokens for sequence in batch])
    ordered = [batch[index] for index in order]
    shared = shared_lengths([sequence.tokens for sequence in ordered])
    runs = runs_of([sequence.num_tokens for sequence in ordered], shared, max_tokens=max_tokens, num_ranks=1)
    return [pack([ordered[place] for place in run], share_prefixes=True) for run in runs]


def _row(pair: ModelPair, what: str, batch: list[TokenSequence], *, goal: str) -> Row:
    num_tokens = sum(sequence.num_tokens for sequence in batch)
    limit = pair.size.micro_batch_tokens
    speeds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(1 + (NUM_REPEATS if pair.size is QUICKSTART else NUM_REPEATS_LARGER)):
        for side in (0, 1) if repeat % 2 else (1, 0):
            began = _now(pair)
            pair.train(batch, pair.packs(batch) if side else shared_packs(batch, max_tokens=limit))
            if repeat:  # the first warms up
                speeds[side].append(num_tokens / (_now(pair) - began))
    num_computed = sum(sum(packed.computed_lengths) for packed in shared_packs(batch, max_tokens=limit))
    return Row.of(
        f"{what}: whole step, {num_computed / num_tokens:.0%} of the tokens computed, against all of them",
        speeds[0],
        unit="tokens/s" if pair.ranks.device.type == "cuda" else "tokens/CPU s",
        against=speeds[1],
        goal=goal,
    )


def _now(pair: ModelPair) -> float:
    if pair.ranks.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _branches(size: Size) -> list[Tokens]:
    """Every path of a tree, from its root to a leaf."""
    rng = np.random.default_rng(2)
    paths = [rng.integers(0, size.vocab_size, 100 * size.times_as_long)]
    for _ in range(4):
        stretches = rng.integers(0, size.vocab_size, (len(paths), 2, 60 * size.times_as_long))
        paths = [
            np.concatenate([path, stretch]) for path, both in zip(paths, stretches, strict=True) for stretch in both
        ]
    return paths


def _numbered(drawn: list[Tokens], size: Size) -> list[TokenSequence]:
    """Every third token was sampled by a policy that is uniform over the vocabulary, also of a shared prefix."""
    rng = np.random.default_rng(3)
    sequences = []
    for tokens in drawn:
        loss_mask = np.arange(len(tokens)) % LOSS_EVERY == LOSS_EVERY - 1
        sequences.append(
            TokenSequence(
                tokens=tokens.astype(np.int32),
                loss_mask=loss_mask,
                behaviour_logprobs=np.where(loss_mask, -np.log(size.vocab_size), 0).astype(np.float32),
                advantages=np.full(len(tokens), rng.normal(), dtype=np.float32),
                kept=None,
            )
        )
    return numbered([sequence] for sequence in sequences)


if __name__ == "__main__":
    sys.exit(main())
