"""`make study-tree-noise`: the noise of the gradient with attempts that fork, beside chains, at equal sampled turns.

There is no model: a policy has one logit for each of 8 turns, so the gradient is known exactly. Groups of 8 attempts
are sampled, and their gradients estimated as the learner does.
"""

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Fork, Sampling, Task
from slipstream.learner.objective.tree import Leaf, tree_advantages
from slipstream.replay.records.forks import planned_forks
from slipstream.replay.records.ticket import Ticket
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.page import markdown, with_table

NUM_TURNS, NUM_MEMBERS, CHANCE = 8, 8, 0.5
NUM_GROUPS, NUM_PARTS = 200, 8  # the spread of an estimate is that of its parts

Actions = tuple[bool, ...]  # of each turn, whether it was right
Vector = npt.NDArray[np.float64]

RETURNS: dict[str, Callable[[Actions], float]] = {
    "every turn counts": lambda actions: sum(actions) / NUM_TURNS,
    "the first two turns decide": lambda actions: float(all(actions[:2])),
    "two turns in the middle decide": lambda actions: float(all(actions[3:5])),
    "the last two turns decide": lambda actions: float(all(actions[-2:])),
    "the first and the last turn decide": lambda actions: float(actions[0] and actions[-1]),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """How a group is grown."""

    num_trees: int  # 0: chains
    max_fork_turn: int = 0

    def forks(self, group_id: int) -> dict[int, Fork]:
        return planned_forks(
            Ticket(
                group_id=group_id,
                task=Task(env="toy", split="train", index=0),
                num_members=NUM_MEMBERS,
                min_policy_version=0,
                sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=1),
                seed=0,
                num_trees=self.num_trees,
                max_fork_turn=self.max_fork_turn,
            )
        )


ARMS = {
    "chains": Arm(num_trees=0),
    "4 trees, forks after 1 to 4 turns": Arm(num_trees=4, max_fork_turn=4),
    "4 trees, 1 to 7": Arm(num_trees=4, max_fork_turn=7),
    "2 trees, 1 to 4": Arm(num_trees=2, max_fork_turn=4),
    "2 trees, 1 to 7": Arm(num_trees=2, max_fork_turn=7),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The gradient from one group."""

    gradient: Vector  # divided by the number of attempts that begin at the start, so that its mean is the gradient
    num_turns: int  # sampled


def policy_gradient(total: Callable[[Actions], float]) -> Vector:
    """The gradient of the mean return by the logits, from all paths."""
    paths = list(itertools.product((True, False), repeat=NUM_TURNS))
    return sum((total(path) * scores(path) for path in paths), np.zeros(NUM_TURNS)) * CHANCE**NUM_TURNS


def scores(actions: Actions) -> Vector:
    """The gradient of each action's log-probability by the logit of its turn."""
    return np.array(actions, dtype=np.float64) - CHANCE


def estimate(arm: Arm, total: Callable[[Actions], float], *, group_id: int, draw: random.Random) -> Estimate:
    """Play a group, and estimate the gradient from it."""
    forks, played = arm.forks(group_id), list[Actions]()
    for member in range(NUM_MEMBERS):
        shared = played[forks[member].parent][: forks[member].num_turns] if member in forks else ()
        played.append((*shared, *(draw.random() < CHANCE for _ in range(NUM_TURNS - len(shared)))))
    leaves = [
        Leaf(total=total(actions), num_turns=NUM_TURNS, fork=forks.get(member)) for member, actions in enumerate(played)
    ]
    num_starts = arm.num_trees or NUM_MEMBERS
    credits = tree_advantages(leaves, num_trees=num_starts)
    found = sum(
        (credit.weights * credit.advantages * scores(actions) for credit, actions in zip(credits, played, strict=True)),
        np.zeros(NUM_TURNS),
    )
    num_shared = sum(fork.num_turns for fork in forks.values())
    return Estimate(gradient=found / num_starts, num_turns=NUM_MEMBERS * NUM_TURNS - num_shared)


def signal(estimates: Sequence[Estimate], true: Vector) -> float:
    """The squared gradient over the variance of its estimate, for each sampled turn."""
    error = statistics.fmean(float(np.square(each.gradient - true).sum()) for each in estimates)
    return float(true @ true) / error / statistics.fmean(each.num_turns for each in estimates)


def table(*, num_groups: int = NUM_GROUPS) -> str:
    """In Markdown, the signal of each arm and return as a multiple of that of chains, with its standard error."""
    rows = []
    for name, total in RETURNS.items():
        true, of_arms = policy_gradient(total), []
        for arm in ARMS.values():
            draw = random.Random(0)
            found = [estimate(arm, total, group_id=group_id, draw=draw) for group_id in range(num_groups)]
            of_arms.append([signal(found[part::NUM_PARTS], true) for part in range(NUM_PARTS)])
        chains = statistics.fmean(of_arms[0])
        rows.append([name, *(_spread([part / chains for part in parts]) for parts in of_arms)])
    return markdown(["return", *ARMS], rows)


def _spread(parts: Sequence[float]) -> str:
    return f"{statistics.fmean(parts):.2f} ± {statistics.stdev(parts) / len(parts) ** 0.5:.2f}"


def main(arguments: Sequence[str]) -> None:
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(prog="study_tree_noise", description=__doc__)
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    options = parser.parse_args(arguments)
    found = f"{table()}\n`python -m slipstream.tools.lab.study.tree_noise`, {today()}.\n"
    if options.page:
        write_whole(options.page, with_table(options.page.read_text(), found))
    print(found)


if __name__ == "__main__":
    main(sys.argv[1:])
