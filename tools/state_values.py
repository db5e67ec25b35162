"""Scores episodes in batches with a reward model beside an engine, for `slipstream eval` and `collect`."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.config import Config
from common.config_error import ConfigError
from common.trajectory import Trajectory
from tools.fixed_policy import fixed_model_folder

if TYPE_CHECKING:
    from learner.score import RewardScorer

RANK_TIMEOUT_S = 600.0
Numbers = npt.NDArray[np.float64]


class StateValues:
    """Answers many callers at a time: all that wait while a batch is scored are the next batch."""

    def __init__(self, scorer: "RewardScorer") -> None:
        self.scorer = scorer
        self._waiting: list[tuple[Trajectory, asyncio.Future[Numbers]]] = []
        self._scoring = asyncio.Lock()

    async def of_turns(self, record: Trajectory) -> Numbers:
        """The probability of success after each turn; of a model of outcome, its one score. Raises ConfigError."""
        answer: asyncio.Future[Numbers] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, answer))
        async with self._scoring:
            if not answer.done():
                await self._score_waiting()
        return answer.result()

    async def of_state(self, record: Trajectory) -> float:
        """The probability of success after the last turn."""
        return float((await self.of_turns(record))[-1])

    async def _score_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            found = await asyncio.to_thread(self.scorer.values, [record for record, _ in batch])
        except ConfigError as error:
            for _, answer in batch:
                answer.set_exception(error)
            return
        for (_, answer), values in zip(batch, found, strict=True):
            answer.set_result(values)


@contextlib.contextmanager
def reward_model_beside(config: Config, folder: str) -> Iterator[StateValues | None]:
    """The reward model in `folder` for the model that `config` plays with; None if `folder` is empty.

    Raises ConfigError if it is no reward model, or of another tokenizer.
    """
    if not folder:
        yield None
        return
    from learner.model.packed_model import ModelSettings  # they import torch
    from learner.ranks import join_ranks, leave_ranks, resolve_dtype
    from learner.score import load_scorer

    policy = fixed_model_folder(config)
    ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        resolve_dtype(config, ranks.device)
        scorer = load_scorer(
            Path(folder),
            policy=policy,
            settings=ModelSettings.of(config).frozen(),
            micro_batch_tokens=config.learner.micro_batch_tokens,
            ranks=ranks,
        )
        yield StateValues(scorer)
    finally:
        leave_ranks()


def check_searches(values: StateValues | None) -> None:
    """Raise ConfigError for a model of outcome: it cannot score a state in the middle of an episode."""
    if values is not None and not values.scorer.model.is_process:
        raise ConfigError(
            f"`--reward-model` {values.scorer.model.folder} scores whole episodes, and a search needs a value of every "
            "state; give a folder of `slipstream prm`"
        )
