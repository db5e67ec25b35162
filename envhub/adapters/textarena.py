"""`textarena`: the single-player games of the package TextArena.

An observation has the game's new messages only; TextArena's own wrappers would repeat the whole history each time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.global_random import GlobalRandom
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.env_options import check_known
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.package import require_package
from slipstream.envhub.task_seed import task_rng

INSTALL = "'textarena==0.7.4'"
_RAW = "-raw"  # the suffix of a game's id without wrappers


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    game: Any
    random_state: GlobalRandom


class TextArenaEnv(EpisodeEnv[_Episode]):
    """One game for one player. The reward component is `game`: its own, at the end; the score is that in [0, 1].

    Options: `game`, its id, and `settings`, further arguments of `textarena.make`. For invalid actions the game's own
    rule holds: most allow one, and end at a second one in a row.
    """

    def __init__(self, *, game: str = "GuessTheNumber-v0", settings: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError if TextArena is missing, or one player cannot play the game here."""
        self._textarena = require_package("textarena", install=INSTALL)
        self._game, self._settings = game, dict(settings or {})
        names = [name for name in self._textarena.envs.registration.ENV_REGISTRY if not name.endswith(_RAW)]
        check_known("game", game, names, of="TextArena's ids", usual="GuessTheNumber-v0")
        self._check_playable()

    async def reset(self, task: Task) -> Observation:
        seed = task_rng(task, world=f"textarena/{self._game}").getrandbits(31)
        game, random_state = self._start(seed)
        self._episode = _Episode(task=task, game=game, random_state=random_state)
        return opened(self._news(game))

    async def _act(self, episode: _Episode, action: str) -> Observation:
        game = episode.game
        with episode.random_state.within():
            is_over, _ = game.step(action=action)
        if not is_over:
            return answered(self._news(game), {"game": 0.0}, valid=game.state.error_count == 0)
        rewards, info = game.close()
        if not isinstance(rewards[0], int | float):  # some games of 0.7.4 return the reason instead of the reward
            raise EnvError(f"{self._game} gave {rewards[0]!r} as its reward, not a number")
        reward = float(rewards[0])
        return answered(
            str(info[0].get("reason") or "the game is over"),
            {"game": reward},
            valid=not info[0]["invalid_move"],
            terminated=True,
            score=min(1.0, max(0.0, reward)),
        )

    def _start(self, seed: int) -> tuple[Any, GlobalRandom]:
        random_state = GlobalRandom(seed)
        with random_state.within():
            game = self._textarena.make(f"{self._game}{_RAW}", **self._settings)
            game.reset(num_players=1, seed=seed)
        return game, random_state

    def _news(self, game: Any) -> str:
        """Return the game's messages since the last call, without the player's own."""
        _, messages = game.get_observation()
        own = self._textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in messages if kind is not own).strip() or "(nothing new)"

    def _check_playable(self) -> None:
        """Raise ValueError unless the game starts: it may need more players or a word list, or not even compile."""
        try:
            self._start(0)
        except (AssertionError, ImportError, LookupError, OSError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(
                f"`env.options.game` must be a game that one player can start here, got {self._game}: "
                f"{_first_lines(error)}"
            ) from error


def _first_lines(error: Exception) -> str:
    lines = [line.strip(" *") for line in str(error).splitlines()]
    return " ".join(line for line in lines if line)[:300]
