"""`gymnasium`: environments of the Gymnasium package, with observations as text and actions from text.

Those of toy-text (FrozenLake, Taxi, CliffWalking, Blackjack) have a `Speech`; for others the user writes one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.common.process.imported import import_own, imported
from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.gym_toys import TOYS
from slipstream.envhub.env import Observation
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.gym_speech import Ending, Moment, Speech
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.envhub.package import require_package
from slipstream.envhub.task_seed import task_rng

INSTALL = "'gymnasium==1.4.*'"


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    moment: Moment


class GymEnv(EpisodeEnv[_Episode]):
    """One environment of Gymnasium. The reward component is `gym`: Gymnasium's own; `Speech` computes the score.

    Options: `game`, its id (`FrozenLake-v1`, or `module:Id-v0` for one that importing `module` registers), `settings`,
    further arguments of `gymnasium.make`, and `speech`, `module:NAME` of a `Speech`, for all but those of toy-text.
    """

    def __init__(
        self, *, game: str = "FrozenLake-v1", speech: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ValueError if Gymnasium is missing, the game is unknown, or it has no `Speech`."""
        self._gymnasium = require_package("gymnasium", install=INSTALL)
        self._game, self._settings = _known_game(self._gymnasium, game), dict(settings or {})
        if not speech and self._game not in TOYS:
            raise ValueError(
                f"`env.options.speech` must name a slipstream.envhub.gym_speech.Speech for {game}, such as "
                f"my_games:SPEECH; only {', '.join(TOYS)} work without one"
            )
        self._speech: Speech = imported("env.options.speech", speech, Speech) if speech else TOYS[self._game]
        self._thread: OwnThread | None = None
        self._env: Any = None  # lives in the thread

    async def reset(self, task: Task) -> Observation:
        seed = task_rng(task, world=f"gymnasium/{self._game}").getrandbits(31)
        self._thread = self._thread or OwnThread(f"gymnasium {self._game}")
        observation, info = await self._thread.call(lambda: self._start(seed))
        moment = Moment(env=self._env.unwrapped, observation=observation, info=info)
        self._episode = _Episode(task=task, moment=moment)
        return opened(self._speech.show(moment), rules=self._speech.rules)

    async def _act(self, episode: _Episode, action: str) -> Observation:
        meant = self._speech.parse(episode.moment, action)
        if meant is None:
            return answered(f"no such action\n{self._speech.show(episode.moment)}", {"gym": 0.0}, valid=False)
        assert self._thread is not None
        observation, reward, terminated, truncated, info = await self._thread.call(lambda: self._env.step(meant))
        episode.moment = replace(episode.moment, observation=observation, info=info)
        total_reward = episode.total_reward + float(reward)
        ending = Ending(terminated=bool(terminated), last_reward=float(reward), total_reward=total_reward)
        score = self._speech.score(ending) if terminated or truncated else 0.0
        return answered(
            self._speech.show(episode.moment),
            {"gym": float(reward)},
            terminated=bool(terminated),
            truncated=bool(truncated),
            score=score,
        )

    async def close(self) -> None:
        thread, self._thread, self._episode = self._thread, None, None
        if thread is not None:
            await thread.call_last(self._stop)

    def admissible(self) -> list[str] | None:
        episode = self._started()
        if self._speech.actions is None:
            return None
        return [] if episode.is_over else self._speech.actions(episode.moment)

    def state_key(self) -> str:
        """Return the key that `Speech` gives to the observation; "" if it has no `key`."""
        episode = self._started()
        return f"{episode.task.task_id} {self._speech.key(episode.moment)}" if self._speech.key else ""

    def expert(self) -> str:
        episode = self._running()
        if self._speech.expert is None:
            raise NotImplementedError(f"the speech of {self._game} has no expert")
        return self._speech.expert(episode.moment)

    def _start(self, seed: int) -> tuple[Any, Mapping[str, Any]]:
        if self._env is None:
            self._env = self._gymnasium.make(self._game, **self._settings)
        observation, info = self._env.reset(seed=seed)
        return observation, info

    def _stop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _known_game(gymnasium: Any, game: str) -> str:
    """Import the module of the id and return the id without it. Raises ValueError if it is not registered."""
    module, _, name = game.rpartition(":")
    try:
        if module:
            import_own(module)
        gymnasium.spec(name)
    except (ImportError, gymnasium.error.Error) as error:
        raise ValueError(
            f"`env.options.game` must be an environment that Gymnasium knows, got {game!r}: {error}; "
            "use a registered id, or module:Id-v0 for one that importing module registers"
        ) from error
    return name
