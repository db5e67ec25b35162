"""`make study-credit`: what the quickstart's first weights learn if an expert says which turn was good, by tokens.

It is a yardstick for every estimate of advantages, be it of siblings or of a critic. An arm plays as the policy, and
asks an expert in each state of its own:

- **credit**: how many steps are left. A state is worth q^steps, where q is the share of turns that bring an episode one
  step nearer; it is worth 0 if the turns do not suffice. A turn's advantage is what the state gained by it, divided by
  the standard deviation of the batch. The policy gradient on it is that of a run whose critic knows the task.
- **correction**: what to do. The policy imitates that, where it would have acted itself (DAgger,
  https://arxiv.org/abs/1011.0686). No method that learns from rewards is given as much.

Every episode is of a new task, and is used once, by the weights that played it. Every result is a file; a cell with a
result is not run again.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from actors.engine import Completion, Restriction, Sampler
from common.action_format import ActionFormat, format_of
from common.chat import reply_form
from common.config import Config, load_config
from common.run_dir import write_whole
from common.trajectory import LogprobArray, Sampling, Task, Trajectory
from envhub.catalogue import num_held_out
from envhub.env import Env
from learner.pack import TokenSequence, count_loss_tokens, micro_batches, sequences_of
from learner.ranks import Ranks
from learner.step import StepBatch, StepModels, StepSettings, train_step
from learner.warm_start import imitate_batch
from tools.bench.benchmark import today
from tools.prepare import expert_reply
from tools.study.cells import ranks, run_cells
from tools.study.episodes import held_out, train_episodes
from tools.study.goodput import SEEDS, TASK, spread_over_seeds
from tools.study.page import markdown
from tools.study.run import Practice, practice, snapshot, warm_start

ARMS = {"credit": (64, "5e-4"), "correction": (16, "1e-3")}  # episodes a step, and the learning rate
MAX_TOKENS = 1_000_000
EVERY = 100_000  # tokens between two evaluations
FIRST_TASK = 10_000  # those of the warm start come before


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An evaluation."""

    tokens: int  # of all episodes before it: prompt and sampled
    success: float  # of sampled episodes on held-out tasks


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell."""

    arm: str
    seed: int
    points: list[Point]
    explained: float  # share of the variance of success that the value of a state explains, in the mean over all steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """What the expert says in each state of an episode."""

    steps_left: list[int | None] = field(default_factory=list)  # None: success is out of reach
    replies: list[list[int]] = field(default_factory=list)  # the tokens that it would write


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """Plays as `player`, and asks the environment's expert before each turn."""

    player: Sampler
    env: Env
    noted: Noted
    tokenizer: PreTrainedTokenizerBase
    action_format: ActionFormat
    max_turns: int

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        restriction: Restriction | None = None,
    ) -> Completion:
        left = self.max_turns - len(self.noted.steps_left)
        self.noted.steps_left.append(await steps_of_expert(self.env, at_most=left))
        reply = await expert_reply(self.env, self.action_format, self.env.expert())
        written = reply_form(self.tokenizer).write(reply)
        self.noted.replies.append(list(self.tokenizer.encode(written, add_special_tokens=False)))
        return await self.player.generate(tokens, sampling, seed=seed, restriction=restriction)


async def steps_of_expert(env: Env, *, at_most: int) -> int | None:
    """The steps that the expert needs from here; None if it fails, or needs more. `env` stays in its state."""
    state = env.snapshot()
    try:
        for step in range(1, at_most + 1):
            observation = await env.step(env.expert())
            if observation.success:
                return step
            if observation.terminated or observation.truncated:
                return None
        return None
    finally:
        env.restore(state)


def values_of(steps_left: Sequence[int | None], *, success: bool, on_track: float) -> list[float]:
    """The value of the state before each turn, and of the end.

    With steps 2, 1, None and no success, and `on_track` 0.9: 0.81, 0.9, 0 and 0.
    """
    return [0.0 if left is None else on_track**left for left in steps_left] + [float(success)]


def kept_on_track(steps_left: Sequence[int | None], *, success: bool) -> list[bool]:
    """Whether each turn from which success could be reached brought the episode one step nearer to it.

    With steps 2, 1, 1, None and no success: True, False and False.
    """
    after = [*steps_left[1:], 0 if success else None]
    turns = zip(steps_left, after, strict=True)
    return [then is not None and then < left for left, then in turns if left is not None]


def explained_variance(values: Sequence[float], outcomes: Sequence[float]) -> float:
    """1 - var(outcome - value) / var(outcome); 0 where all outcomes are equal."""
    spread = float(np.var(outcomes))
    return 1 - float(np.var(np.subtract(outcomes, values))) / spread if spread else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run, and the place of its files."""

    arm: str
    seed: int
    folder: Path
    max_tokens: int = MAX_TOKENS
    every: int = EVERY
    settings: tuple[str, ...]  # `a.b=c` that all cells share

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def warm_name(self) -> str:
        return f"warm-seed{self.seed}"

    def config(self) -> Config:
        """What the cell trains with; the sampler has 64 slots."""
        model = f"model.path={self.folder / self.warm_name / 'trained_model'}"
        return self._loaded(self.name, model, f"optim.lr={ARMS[self.arm][1]}")

    def warm_config(self) -> Config:
        """The run that makes the first weights of all cells of this seed."""
        return self._loaded(self.warm_name)

    def _loaded(self, name: str, *settings: str) -> Config:
        own = (f"run.name={name}", f"run.root={self.folder}", f"run.seed={self.seed}")
        return load_config(TASK, ["eval.num_tasks=400", *self.settings, *settings, *own])


def run_cell(cell: Cell, *, ranks: Ranks) -> Result:
    """Play, ask and train until `max_tokens`, with an evaluation about every `every` tokens."""
    num_episodes, _ = ARMS[cell.arm]
    points: list[Point] = []
    explained: list[float] = []
    tokens, next_task = 0, FIRST_TASK
    with asyncio.Runner() as runner:
        practised = practice(cell.config(), lag=0, ranks=ranks, runner=runner)
        while True:
            practised.setup.sampler.load(snapshot(practised.learner), 0)
            if tokens >= min(len(points) * cell.every, cell.max_tokens):
                points.append(Point(tokens=tokens, success=_success(practised)))
            if tokens >= cell.max_tokens:
                break
            episodes = asked(practised, range(next_task, next_task + num_episodes))
            next_task += num_episodes
            tokens += sum(trajectory.num_tokens for trajectory, _ in episodes)
            explained.append(_learned(practised, cell.arm, episodes))
    return Result(arm=cell.arm, seed=cell.seed, points=points, explained=sum(explained) / len(explained))


def _success(practised: Practice) -> float:
    played = held_out(practised.setup, num_tasks=num_held_out(practised.setup.config))
    return sum(episode.success for episode in played) / len(played)


def asked(practised: Practice, tasks: range) -> list[tuple[Trajectory, Noted]]:
    """An episode of each task, with what the expert says of it."""
    setup = practised.setup
    noted: dict[int, Noted] = defaultdict(Noted)

    def watch(player: Sampler, env: Env, task: Task) -> Sampler:
        return Asking(
            player=player,
            env=env,
            noted=noted[task.index],
            tokenizer=setup.tokenizer,
            action_format=format_of(setup.config.env),
            max_turns=setup.config.env.max_turns,
        )

    played = train_episodes(setup, tasks, watch=watch)
    return [(trajectory, noted[trajectory.task.index]) for trajectory in played]


def _learned(practised: Practice, arm: str, episodes: Sequence[tuple[Trajectory, Noted]]) -> float:
    """Make one optimizer step; return the share of the variance of success that the values explain."""
    learner = practised.learner
    kept = [
        each for trajectory, noted in episodes for each in kept_on_track(noted.steps_left, success=trajectory.success)
    ]
    on_track = sum(kept) / len(kept)
    values = [
        values_of(noted.steps_left, success=trajectory.success, on_track=on_track) for trajectory, noted in episodes
    ]
    if arm == "correction":
        imitate_batch(
            learner.model,
            [sequence for trajectory, noted in episodes for sequence in corrected(trajectory, noted)],
            optimizer=learner.optimizer,
            schedule=learner.schedule,
            max_grad_norm=learner.config.optim.max_grad_norm,
            ranks=learner.ranks,
            micro_batch_tokens=learner.config.learner.micro_batch_tokens,
        )
    else:
        _follow_credit(practised, [trajectory for trajectory, _ in episodes], values)
    outcomes = [float(trajectory.success) for trajectory, _ in episodes]
    return explained_variance(
        [value for each in values for value in each[:-1]],
        [outcome for each, outcome in zip(values, outcomes, strict=True) for _ in each[:-1]],
    )


def corrected(trajectory: Trajectory, noted: Noted) -> list[TokenSequence]:
    """For each turn the tokens before it, and then what the expert would have written, which is to be imitated."""
    tokens, sequences = trajectory.token_array(), []
    for turn, reply in zip(trajectory.turns, noted.replies, strict=True):
        shown = np.concatenate([tokens[: turn.start], np.asarray(reply, dtype=tokens.dtype)])
        nothing = np.zeros(len(shown), dtype=np.float32)
        sequences.append(
            TokenSequence(
                tokens=shown,
                loss_mask=np.arange(len(shown)) >= turn.start,
                behaviour_logprobs=nothing,
                advantages=nothing,
                kept=None,
            )
        )
    return sequences


def _follow_credit(practised: Practice, episodes: Sequence[Trajectory], values: Sequence[Sequence[float]]) -> None:
    """Make one step of the policy gradient."""
    learner = practised.learner
    gains = [np.diff(each) for each in values]
    unit = float(np.std(np.concatenate(gains))) or 1.0
    sequences = [
        sequence
        for episode, gained in zip(episodes, gains, strict=True)
        for sequence in sequences_of(episode, advantage=advantages_of(episode, gained / unit))
    ]
    packs = micro_batches(
        sequences,
        max_tokens=learner.config.learner.micro_batch_tokens,
        num_ranks=learner.ranks.num_packing,
        rank=learner.ranks.packing_rank,
        share_prefixes=learner.model.shares_prefixes,
        context=learner.ranks.context,
    )
    train_step(
        StepModels(policy=learner.model, optimizer=learner.optimizer, schedule=learner.schedule),
        StepBatch(micro_batches=packs, num_loss_tokens=count_loss_tokens(sequences), num_trajectories=len(episodes)),
        settings=StepSettings(objective=learner.config.objective, max_grad_norm=learner.config.optim.max_grad_norm),
        ranks=learner.ranks,
    )


def advantages_of(trajectory: Trajectory, of_turns: Iterable[float]) -> LogprobArray:
    """The advantage of each token: that of its turn; 0 for tokens that the policy did not sample."""
    advantages = np.zeros(trajectory.num_tokens, dtype=np.float32)
    for turn, advantage in zip(trajectory.turns, of_turns, strict=True):
        advantages[turn.start : turn.stop] = advantage
    return advantages


def table(results: Sequence[Result]) -> str:
    """In Markdown, the success of each arm by tokens: means over seeds, with each seed in brackets."""
    arms = {result.arm: [each for each in results if each.arm == result.arm] for result in results}
    rows = []
    for place in range(max(len(result.points) for result in results)):
        row = [f"{place * EVERY:,}"]
        for own in arms.values():
            found = [result.points[place].success for result in own if place < len(result.points)]
            row.append(spread_over_seeds(found, "{:.0%}") if found else "")
        rows.append(row)
    rows.append(
        ["explained", *(spread_over_seeds([each.explained for each in own], "{:.2f}") for own in arms.values())]
    )
    return markdown(["tokens", *arms], rows)


def main(arguments: Sequence[str]) -> None:
    """Run the cells that have no result, and print the table of all."""
    parser = argparse.ArgumentParser(prog="study_credit", description=__doc__)
    parser.add_argument("settings", nargs="*", help="a.b=c for every cell")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="number of processes, each of one thread")
    parser.add_argument("--folder", type=Path, default=Path("build/study_credit"), help="where results are written")
    options = parser.parse_intermixed_args(arguments)
    cells = [
        Cell(arm=arm, seed=seed, folder=options.folder.resolve(), settings=tuple(options.settings))
        for arm in options.arms
        for seed in options.seeds
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not cell.result.exists()]
    run_cells(missing, warm=_warm, warm_name=lambda cell: cell.warm_name, run=_run, workers=options.workers)
    results = [msgspec.json.decode(cell.result.read_bytes(), type=Result) for cell in cells]
    print(f"{table(results)}\n`{' '.join(['python -m tools.study.credit', *arguments])}`, {today()}.")


def _warm(cell: Cell) -> None:
    warm_start(cell.warm_config(), ranks=ranks())


def _run(cell: Cell) -> str:
    result = run_cell(cell, ranks=ranks())
    write_whole(cell.result, msgspec.json.encode(result).decode())
    return f"{result}"


if __name__ == "__main__":
    main(sys.argv[1:])
