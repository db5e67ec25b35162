"""`gymnasium`: environments of the Gymnasium package, spoken: what is seen becomes text, and a text an action.

Toy-text's own (FrozenLake, Taxi, CliffWalking, Blackjack) speak by themselves; for others the user has a `Speech`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.message import Message
from common.trajectory import Task
from envhub.env import Observation
from envhub.gym_speech import Ending, Moment, Speech
from envhub.adapters.gym_toys import TOYS
from envhub.isolation.own_thread import OwnThread
from envhub.package import named_object, require_package
from envhub.replayed_env import ReplayedEnv
from envhub.task_seed import task_rng

INSTALL = "'gymnasium==1.4.*'"


@dataclass(kw_only=True, slots=True)
class _Episode:
    task: Task
    moment: Moment
    total_reward: float = 0.0
    is_over: bool = False


class GymEnv(ReplayedEnv[_Episode]):
    """One environment of Gymnasium. The reward component is `gym`: Gymnasium's own; the score is what `Speech` says.

    Options: `game`, its id (`FrozenLake-v1`, or `module:Id-v0` for one that importing `module` registers), `settings`,
    what `gymnasium.make` is given beside it, and `speech`, `module:NAME` of a `Speech`, for all but toy-text's.
    """

    def __init__(
        self, *, game: str = "FrozenLake-v1", speech: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ValueError where Gymnasium is missing, the game is unknown, or nothing says how it is spoken."""
        self._gymnasium = require_package("gymnasium", install=INSTALL)
        self._game, self._settings = _known_game(self._gymnasium, game), dict(settings or {})
        if not speech and self._game not in TOYS:
            raise ValueError(
                f"`env.options.speech` must name an envhub.gym_speech.Speech for {game}, as my_games:SPEECH; without "
                f"one only {', '.join(TOYS)} can be spoken"
            )
        self._speech: Speech = named_object("speech", speech, Speech) if speech else TOYS[self._game]
        self._thread: OwnThread | None = None
        self._env: Any = None  # lives in the thread
        super().__init__()

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises ValueError for a split that does not exist."""
        seed = task_rng(task, world=f"gymnasium/{self._game}").getrandbits(31)
        self._thread = self._thread or OwnThread(f"gymnasium {self._game}")
        observation, info = await self._thread.call(lambda: self._start(seed))
        moment = Moment(env=self._env.unwrapped, observation=observation, info=info)
        self._episode = _Episode(task=task, moment=moment)
        rules = (Message("system", self._speech.rules),) if self._speech.rules else ()
        return Observation(messages=(*rules, Message("user", self._speech.show(moment))), rewards={})

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError before a reset and after the end."""
        episode = self._running()
        meant = self._speech.parse(episode.moment, action)
        if meant is None:
            text = f"no such action\n{self._speech.show(episode.moment)}"
            return Observation(messages=(Message("user", text),), rewards={"gym": 0.0}, valid_action=False)
        assert self._thread is not None
        observation, reward, terminated, truncated, info = await self._thread.call(lambda: self._env.step(meant))
        episode.moment = replace(episode.moment, observation=observation, info=info)
        episode.total_reward += float(reward)
        episode.is_over = bool(terminated or truncated)
        ending = Ending(
            terminated=bool(terminated), last_reward=float(reward), total_reward=episode.total_reward
        )  # fmt: skip
        score = self._speech.score(ending) if episode.is_over else 0.0
        return Observation(
            messages=(Message("user", self._speech.show(episode.moment)),),
            rewards={"gym": float(reward)},
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
            score=score,
            success=score == 1.0,
        )

    async def close(self) -> None:
        thread, self._thread, self._episode = self._thread, None, None
        if thread is None:
            return
        try:
            await thread.call(self._stop)
        finally:
            thread.end()

    def admissible(self) -> list[str] | None:
        """What makes sense now, none after the end; None where `Speech` does not list it."""
        episode = self._started()
        if self._speech.actions is None:
            return None
        return [] if episode.is_over else self._speech.actions(episode.moment)

    def state_key(self) -> str:
        """The key that `Speech` gives to what is seen; "" where it gives none."""
        episode = self._started()
        return f"{episode.task.task_id} {self._speech.key(episode.moment)}" if self._speech.key else ""

    def expert(self) -> str:
        """A good next action. Raises EnvError after the end, NotImplementedError where `Speech` has no expert."""
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
    """The id without its module, which is imported. Raises ValueError for one that is not registered."""
    module, _, name = game.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except (ImportError, gymnasium.error.Error) as error:
        raise ValueError(
            f"`env.options.game` {game!r} is no environment of Gymnasium here: {error}; "
            "name a registered id, or module:Id-v0 for one that importing module registers"
        ) from error
    return name
