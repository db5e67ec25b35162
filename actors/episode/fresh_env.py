"""Makes the environment of one episode, and leaves nothing of it behind."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from slipstream.actors.episode.answer import Boundary
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import StopReason, Task
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.driving import DrivingEnv
from slipstream.envhub.env import Env, EnvError
from slipstream.envhub.isolation.offspring import begin_episode, end_offspring

HASTY_CLOSE_S = 2.0

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def fresh_env(
    envs: Mapping[str, MixtureEntry], task: Task, *, timeout_s: float
) -> AsyncIterator[Env | DrivingEnv]:
    """The environment of `task` for one episode. Afterwards it is closed, and the processes that it started are killed.

    Raises EpisodeFailed if it cannot be made.
    """
    if (part := envs.get(task.env)) is None:
        known = ", ".join(envs)
        raise EpisodeFailed(StopReason.ENV_ERROR, f"the run has no environment {task.env!r}, only {known}")
    mark = begin_episode()
    try:
        try:
            with Boundary():
                env = make_any_env(part.name, part.options)
        except EnvError as error:
            raise EpisodeFailed(StopReason.ENV_ERROR, f"the environment cannot be made: {error}") from error
        async with _closing(env, task.env, timeout_s=timeout_s):
            yield env
    finally:
        num_left = await asyncio.shield(asyncio.to_thread(end_offspring, mark))
        if num_left:
            log.info("killed %d processes that environment %s had left running", num_left, task.env)


@contextlib.asynccontextmanager
async def _closing(env: Env | DrivingEnv, name: str, *, timeout_s: float) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        timeout_s = min(timeout_s, HASTY_CLOSE_S)  # the group is given back after this, and the host may go soon
        raise
    finally:
        try:
            with Boundary():
                async with asyncio.timeout(timeout_s):
                    await env.close()
        except EnvError as error:  # the episode is complete anyway
            log.warning("environment %s failed to close: %s", name, error)
