"""What screens and group sizes gain, computed from what a run recorded. It plays nothing.

    python -m slipstream.tools.lab.study.screen runs/quickstart

Of each group that the run trained or dropped, only the number of successes counts; a dropped group counts as all
successes or none, in the share that the run's success implies. From these numbers comes the distribution of the tasks'
chances of success (`chances_of`), and from that the signal of the gradient per episode for any size and screen.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Float

from slipstream.common.config.config import load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.run.archive import Archive
from slipstream.tools.lab.study.page import markdown

CHANCES = np.linspace(0.0025, 0.9975, 200)  # the chances of success that a task may have
ROUNDS = 4000  # of expectation and maximisation
SIZES = ((2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (8, 3), (8, 4), (8, 6), (16, 4), (16, 8))  # group, screen or 0

Weights = Float[np.ndarray, " _chances"]


def binomial(num: int) -> Float[np.ndarray, " chances successes"]:
    """The probability of 0 to `num` successes, for each of CHANCES."""
    rows = np.ones((len(CHANCES), 1))
    for _ in range(num):
        rows = (
            np.pad(rows, ((0, 0), (0, 1))) * (1 - CHANCES)[:, None] + np.pad(rows, ((0, 0), (1, 0))) * CHANCES[:, None]
        )
    return rows


def chances_of(counts: Sequence[float]) -> Weights:
    """The distribution over CHANCES that makes groups with `counts[k]` times k successes most likely."""
    found, weights = np.asarray(counts, dtype=np.float64), np.full(len(CHANCES), 1 / len(CHANCES))
    likelihoods = binomial(len(found) - 1)
    for _ in range(ROUNDS):
        weights *= likelihoods @ (found / np.maximum(weights @ likelihoods, 1e-300)) / found.sum()
    return weights


def teaching(size: int, screen: int) -> Float[np.ndarray, " chances successes"]:
    """The probability that a group has k successes and teaches: its screen differs or, without one, the whole group."""
    if not screen:
        rows = binomial(size)
        rows[:, [0, -1]] = 0
        return rows
    first, others = binomial(screen), binomial(size - screen)
    rows = np.zeros((len(CHANCES), size + 1))
    for successes in range(1, screen):
        rows[:, successes : successes + size - screen + 1] += first[:, [successes]] * others
    return rows


def episodes_played(size: int, screen: int) -> Float[np.ndarray, " chances"]:
    """The expected episodes of a group."""
    if not screen:
        return np.full(len(CHANCES), float(size))
    passing: Float[np.ndarray, " chances"] = teaching(size, screen).sum(axis=1)
    return screen + (size - screen) * passing


def signal(weights: Weights, size: int, screen: int, *, own: float) -> float:
    """The squared signal to noise that an episode adds to the gradient of a step, in an arbitrary unit.

    A group's gradient, by centred returns, is A = k (n - k) / n times the difference between the mean gradients of its
    successes and its failures, and the noise of its episodes. That difference has a part that all tasks share, the
    signal, and one of the task's own, which is noise too. More tasks average it out; more attempts at one do not.

        signal to noise = E[A]^2 / (own E[A^2] + E[A]) / E[episodes]

    `own` is the squared size of the task's part in units of the noise of one episode:
    `slipstream.tools.lab.study.task_gradients` measures it.
    """
    successes = np.arange(size + 1)
    energy, expected = successes * (size - successes) / size, weights @ teaching(size, screen)
    first, second = float(expected @ energy), float(expected @ energy**2)
    return first**2 / (own * second + first) / float(weights @ episodes_played(size, screen))


def with_known_chances(weights: Weights, fewest: int, most: int) -> float:
    """The best signal an episode with `own` 0, if each task's chance were known and its group had a size to suit it.

    Only the sizes `fewest` and `most` occur, as the sum of p (1 - p) (n - 1) is linear in each n. The larger one is for
    tasks whose p (1 - p) is above the best threshold.
    """
    spread = CHANCES * (1 - CHANCES)
    sizes = [np.where(spread >= least, most, fewest) for least in spread]
    return max(float(weights @ (spread * (each - 1)) / (weights @ each)) for each in sizes)


def table(weights: Weights, *, own: float) -> str:
    """In Markdown, what each of SIZES gives, compared with groups of 8."""
    rows = []
    for size, screen in SIZES:
        share = float(weights @ teaching(size, screen).sum(axis=1))
        played = float(weights @ episodes_played(size, screen))
        gains = [
            f"{signal(weights, size, screen, own=each) / signal(weights, 8, 0, own=each) - 1:+.0%}"
            for each in (0.0, own)
        ]
        name = f"{screen}, then {size}" if screen else str(size)
        rows.append([name, f"{share:.0%}", f"{played / share:.1f}", f"{size * share / played:.2f}", *gains])
    known = with_known_chances(weights, 4, 16) / signal(weights, 8, 0, own=0.0) - 1
    rows.append(["4 or 16, chances known", "", "", "", f"{known:+.0%}", ""])
    head = [
        "group",
        "teach",
        "episodes for one that teaches",
        "trained ÷ finished",
        "signal, `own` 0",
        f"`own` {own:g}",
    ]
    return markdown(head, rows)


def counts_of(run_dir: RunDir, steps: range) -> list[float]:
    """The groups by their number of successes, of the steps in `steps`, trained and dropped."""
    config = load_config(str(run_dir.config), [])
    archive, size = Archive(run_dir.trajectories, config.run.name), config.replay.group_size
    records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    own = [record for record in records if record["step"] in steps and "perf/step_s" in record]
    counts = [0.0] * (size + 1)
    for step in steps:
        archived = archive.read(step, vocab_size=1 << 30, max_group_bytes=size * config.replay.max_trajectory_bytes)
        for group in archived.groups:
            counts[sum(member.success for member in group.trajectories)] += 1
    num_dropped = sum(record.get("replay/dropped_zero_variance", 0.0) for record in own)
    produced = sum(record["produced/episodes"] for record in own)
    successes = sum(record["produced/episodes"] * record.get("produced/success", 0.0) for record in own)
    trained = sum(counts)
    left = successes - sum(number * groups for number, groups in enumerate(counts))  # of the episodes in dropped groups
    share = min(max(left / max(produced - size * trained, 1.0), 0.0), 1.0)
    counts[size] += num_dropped * share
    counts[0] += num_dropped * (1 - share)
    return counts


def main(arguments: Sequence[str]) -> None:
    """Print the table for each quarter of a run, and for all of it."""
    parser = argparse.ArgumentParser(prog="study_screen", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run without a screen, with its archive")
    parser.add_argument("--own", type=float, default=0.9, help="how far tasks differ, as task_gradients measures it")
    options = parser.parse_args(arguments)
    run = options.run
    run_dir = RunDir(run.parent, run.name)
    last = Archive(run_dir.trajectories, load_config(str(run_dir.config), []).run.name).last_step
    edges = [round(last * quarter / 4) for quarter in range(5)]
    parts = [counts_of(run_dir, range(before + 1, after + 1)) for before, after in pairwise(edges)]
    chances = [chances_of(counts) for counts in parts]
    for edge, counts, weights in zip(edges[1:], parts, chances, strict=True):
        print(f"until step {edge}: groups by successes {[round(each) for each in counts]}\n")
        print(table(weights, own=options.own))
    # Chances change while the policy learns, so those of the quarters are mixed.
    mixed = np.average(chances, axis=0, weights=[sum(counts) for counts in parts])
    print(f"all steps\n\n{table(mixed, own=options.own)}")


if __name__ == "__main__":
    main(sys.argv[1:])
