"""`make study-imitation`: what the quickstart's first weights learn from a flawless expert, by tokens.

It is a yardstick for reinforcement learning, which has to find by trying what the expert shows: how much can as many
tokens teach this model at all? A cell imitates fresh episodes of the expert once, from the quickstart's warm start, and
plays held-out tasks. Every result is a file; a cell with a result is not run again.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import format_of
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.warm_start import imitate
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.cells import ranks, run_cells
from slipstream.tools.lab.study.episodes import held_out
from slipstream.tools.lab.study.goodput import SEEDS, spread_over_seeds
from slipstream.tools.lab.study.page import markdown
from slipstream.tools.lab.study.run import practice, snapshot
from slipstream.tools.lab.study.warm_cell import WarmCell, make_warm
from slipstream.tools.run.prepare import NoisyExpert, expert_episodes

EPISODES = (2000, 4000, 8000)
RATES = ("1e-3", "3e-3")  # the highest is that of the quickstart's warm start
FIRST_TASK = 10_000  # those of the warm start come before


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell."""

    episodes: int  # of the expert
    rate: str  # the learning rate at the start, from which it falls to 0
    seed: int
    tokens: int  # of the episodes: prompt and written
    success: float  # of sampled episodes on held-out tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(WarmCell):
    """A number of the expert's episodes, and the learning rate at the start."""

    episodes: int
    rate: str

    @property
    def name(self) -> str:
        return f"{self.episodes}-{self.rate}-seed{self.seed}"

    def config(self) -> Config:
        """What the cell trains with."""
        return self.trained_with(f"warm_start.lr={self.rate}", "warm_start.noise=0.0")


def run_cell(cell: Cell, *, ranks: Ranks) -> Result:
    """Imitate, and play the held-out tasks."""
    config = cell.config()
    with asyncio.Runner() as runner:
        practised = practice(config, lag=0, ranks=ranks, runner=runner)
        tokenizer, written_as = practised.setup.tokenizer, format_of(config.env)
        tasks = {
            index: Task(env=config.env.name, split="train", index=FIRST_TASK + index) for index in range(cell.episodes)
        }
        shown = list(
            expert_episodes(
                config, tokenizer, tasks, sampler=lambda env, _: NoisyExpert(env, tokenizer, written_as, noise=0.0)
            )
        )
        imitate(
            practised.learner.model,
            shown,
            config=config.warm_start,
            ranks=ranks,
            seed=cell.seed,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            on_step=lambda step: None,
        )
        practised.setup.sampler.load(snapshot(practised.learner), practised.learner.progress.policy_version)
        played = held_out(practised.setup, num_tasks=num_held_out(config))
    return Result(
        episodes=cell.episodes,
        rate=cell.rate,
        seed=cell.seed,
        tokens=sum(len(episode.token_array()) for episode in shown),
        success=sum(episode.success for episode in played) / len(played),
    )


def table(results: Sequence[Result]) -> str:
    """In Markdown, the success by tokens and rate: means over seeds, with each seed in brackets."""
    rates = sorted({result.rate for result in results}, key=float)
    rows = []
    for episodes in sorted({result.episodes for result in results}):
        own = [result for result in results if result.episodes == episodes]
        success = [[result.success for result in own if result.rate == rate] for rate in rates]
        tokens = sum(result.tokens for result in own) / len(own)
        rows.append([f"{tokens:,.0f}", f"{episodes:,}", *(spread_over_seeds(each, "{:.0%}") for each in success)])
    return markdown(["tokens", "episodes", *(f"success, rate {rate}" for rate in rates)], rows)


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and print the table of all."""
    parser = argparse.ArgumentParser(prog="study_imitation", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell")
    parser.add_argument("--episodes", nargs="+", type=int, default=list(EPISODES))
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_imitation"), help="where results are written")
    options = parser.parse_intermixed_args(arguments)
    cells = [
        Cell(episodes=episodes, rate=rate, seed=seed, folder=options.folder.resolve(), settings=tuple(options.settings))
        for seed in options.seeds
        for episodes in options.episodes
        for rate in options.rates
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not cell.result.exists()]
    run_cells(missing, warm=make_warm, warm_name=lambda cell: cell.warm_name, run=_run, workers=options.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells]
    print(f"{table(results)}\n`{' '.join(['python -m slipstream.tools.lab.study.imitation', *arguments])}`, {today()}.")


def _run(cell: Cell) -> str:
    result = run_cell(cell, ranks=ranks())
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{result}"


if __name__ == "__main__":
    main(sys.argv[1:])
