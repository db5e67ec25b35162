"""Values of episodes by a reward model, for `slipstream eval` and `collect`: beside their engine, or behind a URL."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.reward_protocol import CRITICS, OUTCOME, RETURN_TO_GO, Kind, ScoredEpisode
from slipstream.common.records.trajectory import Outcome, StopReason, Trajectory
from slipstream.common.text.tokenizer import text_root
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.reward_client import DEADLINE_S, RewardClient
from slipstream.tools.play.fixed_policy import fixed_model_folder
from slipstream.tools.run.prepare import load_tokenizer

if TYPE_CHECKING:
    from slipstream.learner.credit.score import RewardScorer

RANK_TIMEOUT_S = 600.0
START_S = 20.0  # a server must answer within this time when a verb starts; later it may be away for DEADLINE_S
URL = ("http://", "https://")
Numbers = npt.NDArray[np.float64]


class Batches:
    """Answers many callers at a time: all that wait while a batch is scored are the next batch."""

    def __init__(self, score: Callable[[Sequence[ScoredEpisode]], list[Numbers]]) -> None:
        """`score` runs in a thread, one batch at a time."""
        self._score = score
        self._waiting: list[tuple[ScoredEpisode, asyncio.Future[Numbers]]] = []
        self._scoring: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def values(self, episode: ScoredEpisode) -> Numbers:
        """The values of an episode. Raises what `score` raises for it alone."""
        answer: asyncio.Future[Numbers] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, answer))
        if self._scoring is None or self._scoring.done():  # a task of its own: callers may be cancelled
            self._scoring = asyncio.create_task(self._score_waiting())
        return await answer

    async def _score_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._score_batch(batch)

    async def _score_batch(self, batch: Sequence[tuple[ScoredEpisode, asyncio.Future[Numbers]]]) -> None:
        """Answer a batch; if it fails, each half of it, so that a culprit fails no other."""
        batch = [each for each in batch if not each[1].done()]  # the callers of others were cancelled
        if not batch:
            return
        scored = asyncio.get_running_loop().run_in_executor(None, self._score, [episode for episode, _ in batch])
        await asyncio.wait([scored])
        error = scored.exception()
        if error is not None and len(batch) > 1:
            middle = len(batch) // 2
            await self._score_batch(batch[:middle])
            await self._score_batch(batch[middle:])
            return
        for place, (_, answer) in enumerate(batch):
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(scored.result()[place])


@dataclass(frozen=True, kw_only=True, slots=True)
class StateValues:
    """A reward model that anybody may ask."""

    name: str  # its folder or URL
    kind: Kind
    of_episode: Callable[[ScoredEpisode], Awaitable[Numbers]]

    async def of_turns(self, record: Trajectory) -> Numbers:
        """The probability of success after each turn; of a model of outcome, its one score.

        Raises ConfigError for a score that is not finite, and EpisodeFailed if a server gives no values.
        """
        return await self.of_episode(ScoredEpisode.of(record))

    async def of_state(self, record: Trajectory) -> float:
        """The probability of success after the last turn; of a critic, the expected return of the whole episode.

        A critic is not asked about a finished episode. Raises what `of_turns` raises.
        """
        if self.kind not in CRITICS:
            return float((await self.of_turns(record))[-1])
        if record.outcome is not Outcome.PREEMPTED:
            return record.total_reward
        (value,) = await self.of_episode(ScoredEpisode.of_state(record))
        return float(value) + (record.total_reward if self.kind == RETURN_TO_GO else 0.0)


def scored_here(scorer: "RewardScorer") -> StateValues:
    """The values of a model in this process."""
    return StateValues(name=str(scorer.model.folder), kind=scorer.model.kind, of_episode=Batches(scorer.values).values)


@contextlib.contextmanager
def reward_model_beside(config: Config, place: str) -> Iterator[StateValues | None]:
    """The reward model at `place`, a folder or a URL, for the model that `config` plays with; None if that is empty.

    Raises ConfigError if it is no reward model, or of another tokenizer.
    """
    if not place:
        yield None
    elif place.startswith(URL):
        yield _served(config, place)
    else:
        with scorer_in(config, Path(place), policy=fixed_model_folder(config)) as scorer:
            yield scored_here(scorer)


@contextlib.contextmanager
def scorer_in(config: Config, folder: Path, *, policy: Path | None) -> Iterator["RewardScorer"]:
    """The reward model in `folder`, in this process. Raises ConfigError as `load_scorer` does."""
    from slipstream.learner.credit.score import load_scorer
    from slipstream.learner.model.packed_model import ModelSettings  # they import torch
    from slipstream.learner.ranks.ranks import join_ranks, leave_ranks, resolve_dtype

    ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        resolve_dtype(config.model, ranks.device)
        yield load_scorer(
            folder,
            policy=policy,
            settings=ModelSettings.of(config).frozen(),
            micro_batch_tokens=config.learner.micro_batch_tokens,
            ranks=ranks,
        )
    finally:
        leave_ranks()


def _served(config: Config, url: str) -> StateValues:
    reads = text_root(load_tokenizer(fixed_model_folder(config), config.model))
    try:
        client = RewardClient(url=url, reads=reads, deadline_s=START_S)
        card = asyncio.run(client.card())
    except (ValueError, EnvError) as error:
        raise ConfigError(f"`--reward-model` {url} cannot be asked: {error}") from None
    if card.reads != reads:
        raise ConfigError(
            f"`--reward-model` {url} serves a model of another tokenizer, chat template or "
            "`model.template_arguments` than the policy's; train one from a model of the same family"
        )
    if card.max_tokens < config.model.max_tokens:
        raise ConfigError(
            f"`--reward-model` {url} must read `model.max_tokens` = {config.model.max_tokens} tokens, and it reads "
            f"{card.max_tokens}; start the server with a larger model.max_tokens"
        )

    client.deadline_s = DEADLINE_S

    async def values(episode: ScoredEpisode) -> Numbers:
        try:
            return np.array((await client.values(episode)).values)
        except EnvError as error:
            raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from None

    return StateValues(name=url, kind=card.kind, of_episode=values)


def check_searches(values: StateValues | None) -> None:
    """Raise ConfigError for a model of outcome: it cannot score a state in the middle of an episode."""
    if values is not None and values.kind == OUTCOME:
        raise ConfigError(
            f"`--reward-model` {values.name} scores whole episodes, and a search needs a value of every "
            "state; give a model of `slipstream fit prm`, or a critic of `slipstream export --critic`"
        )
