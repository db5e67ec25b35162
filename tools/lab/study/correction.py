"""`make study-correction`: what the quickstart's first weights learn if an expert says what to do, by tokens.

It is a yardstick for learning from rewards. The policy plays as in a run, and in each state an expert writes what it
would have done there. The policy imitates that (DAgger, https://arxiv.org/abs/1011.0686). So every turn has an answer,
where a reward is one number for an episode. What such a run still needs is the part of the model and of the optimizer.

Every episode is of a new task, and is used once, by the weights that played it. Every result is a file; a cell with a
result is not run again.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, Restriction, Sampler
from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import write_whole
from slipstream.common.records.trajectory import Sampling, Task, Trajectory
from slipstream.common.text.action_format import ActionFormat, format_of
from slipstream.common.text.chat import reply_form
from slipstream.envhub.catalogue import num_held_out
from slipstream.envhub.env import Env
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.warm_start import imitate_batch
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.study.cells import ranks, run_cells
from slipstream.tools.lab.study.episodes import held_out, train_episodes
from slipstream.tools.lab.study.goodput import SEEDS, spread_over_seeds
from slipstream.tools.lab.study.page import markdown
from slipstream.tools.lab.study.run import Practice, practice, snapshot
from slipstream.tools.lab.study.warm_cell import WarmCell, make_warm
from slipstream.tools.run.prepare import expert_reply

EPISODES_PER_STEP = 16
RATE = "1e-3"
MAX_TOKENS = 600_000
EVERY = 100_000  # tokens between two evaluations
FIRST_TASK = 10_000  # those of the warm start come before


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An evaluation."""

    tokens: int  # of all episodes before it: prompt and sampled
    success: float  # of sampled episodes on held-out tasks


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell."""

    seed: int
    points: list[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrected:
    """An episode of the policy, and the tokens that the expert would have written in each turn."""

    trajectory: Trajectory
    replies: list[list[int]]

    def sequences(self) -> list[TokenSequence]:
        """For each turn the tokens before it, and then the expert's, which are to be imitated."""
        tokens, made = self.trajectory.token_array(), []
        for turn, reply in zip(self.trajectory.turns, self.replies, strict=True):
            shown = np.concatenate([tokens[: turn.start], np.asarray(reply, dtype=tokens.dtype)])
            nothing = np.zeros(len(shown), dtype=np.float32)
            made.append(
                TokenSequence(
                    tokens=shown,
                    loss_mask=np.arange(len(shown)) >= turn.start,
                    behaviour_logprobs=nothing,
                    advantages=nothing,
                    kept=None,
                )
            )
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """Plays as `player`, and asks the environment's expert before each turn."""

    player: Sampler
    env: Env
    replies: list[list[int]]  # the expert's so far
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        restriction: Restriction | None = None,
    ) -> Completion:
        reply = await expert_reply(self.env, self.action_format, self.env.expert())
        written = reply_form(self.tokenizer).write(reply)
        self.replies.append(list(self.tokenizer.encode(written, add_special_tokens=False)))
        return await self.player.generate(tokens, sampling, seed=seed, restriction=restriction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(WarmCell):
    """How long the policy plays, and how often it is evaluated."""

    max_tokens: int = MAX_TOKENS
    every: int = EVERY

    @property
    def name(self) -> str:
        return f"corrected-seed{self.seed}"

    def config(self) -> Config:
        """What the cell trains with."""
        return self.trained_with(f"optim.lr={RATE}")


def run_cell(cell: Cell, *, ranks: Ranks) -> Result:
    """Play, ask and imitate until `max_tokens`, with an evaluation about every `every` tokens."""
    points: list[Point] = []
    tokens, next_task = 0, FIRST_TASK
    with asyncio.Runner() as runner:
        practised = practice(cell.config(), lag=0, ranks=ranks, runner=runner)
        while True:
            practised.setup.sampler.load(snapshot(practised.learner), 0)
            if tokens >= min(len(points) * cell.every, cell.max_tokens):
                points.append(Point(tokens=tokens, success=_success(practised)))
            if tokens >= cell.max_tokens:
                return Result(seed=cell.seed, points=points)
            episodes = corrected(practised, range(next_task, next_task + EPISODES_PER_STEP))
            _imitate(practised, episodes)
            next_task += EPISODES_PER_STEP
            tokens += sum(episode.trajectory.num_tokens for episode in episodes)


def corrected(practised: Practice, tasks: range) -> list[Corrected]:
    """An episode of each task, with the expert's answers."""
    setup = practised.setup
    replies: dict[int, list[list[int]]] = {index: [] for index in tasks}

    def watch(player: Sampler, env: Env, task: Task) -> Sampler:
        return Asking(
            player=player,
            env=env,
            replies=replies[task.index],
            tokenizer=setup.tokenizer,
            action_format=format_of(setup.config.env),
        )

    played = train_episodes(setup, tasks, watch=watch)
    return [Corrected(trajectory=each, replies=replies[each.task.index]) for each in played]


def _imitate(practised: Practice, episodes: Sequence[Corrected]) -> None:
    """Make one optimizer step."""
    learner = practised.learner
    imitate_batch(
        learner.model,
        [sequence for episode in episodes for sequence in episode.sequences()],
        optimizer=learner.optimizer,
        schedule=learner.schedule,
        max_grad_norm=learner.config.optim.max_grad_norm,
        ranks=learner.ranks,
        micro_batch_tokens=learner.config.learner.micro_batch_tokens,
    )


def _success(practised: Practice) -> float:
    played = held_out(practised.setup, num_tasks=num_held_out(practised.setup.config))
    return sum(episode.success for episode in played) / len(played)


def table(results: Sequence[Result]) -> str:
    """In Markdown, the success by tokens: means over seeds, with each seed in brackets."""
    rows = []
    for points in zip(*(result.points for result in results), strict=True):
        tokens = sum(point.tokens for point in points) / len(points)
        rows.append([f"{tokens:,.0f}", spread_over_seeds([point.success for point in points], "{:.0%}")])
    return markdown(["tokens", "success"], rows)


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and print the table of all."""
    parser = argparse.ArgumentParser(prog="study_correction", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_correction"), help="where results are written")
    options = parser.parse_intermixed_args(arguments)
    cells = [
        Cell(seed=seed, folder=options.folder.resolve(), settings=tuple(options.settings)) for seed in options.seeds
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not cell.result.exists()]
    run_cells(missing, warm=make_warm, warm_name=lambda cell: cell.warm_name, run=_run, workers=options.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells]
    print(
        f"{table(results)}\n`{' '.join(['python -m slipstream.tools.lab.study.correction', *arguments])}`, {today()}."
    )


def _run(cell: Cell) -> str:
    result = run_cell(cell, ranks=ranks())
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{result}"


if __name__ == "__main__":
    main(sys.argv[1:])
