"""`textworld`: games of the package TextWorld, and those of ALFWorld, on their original engines.

The games are files in a folder: `.z8` with a `.json` of the same name, from TextWorld, or ALFWorld's `game.tw-pddl`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.envhub.package import require_package
from slipstream.envhub.user_files import item_of, read_files, read_json

INSTALL = "'textworld==1.7.0'"
INSTALL_ALFWORLD = "'textworld[pddl]==1.7.0' 'alfworld==0.4.2'"
ALFWORLD = ".tw-pddl"
ENDINGS = (".z8", ALFWORLD)
FETCH = (
    "give a folder of games: of TextWorld's, made by `tw-make`, or of ALFWorld's, fetched by `alfworld-download`, such "
    "as $ALFWORLD_DATA/json_2.1.1/train (held_out: valid_seen or valid_unseen)"
)
LEFT_OUT = ("movable", "Sliced")  # words in the names of games' folders, whose games ALFWorld itself leaves out


class _AlfredGame(msgspec.Struct):
    solvable: bool = True


@dataclass(kw_only=True, slots=True)
class _Episode(Begun):
    state: Any  # textworld's GameState


class TextWorldEnv(EpisodeEnv[_Episode]):
    """One game. The reward component is `game`: the rise of the game's own score; the score is 1 if it is won.

    Options: `train` and `held_out`, folders of games, used in turn in the order of their paths. An action is one of the
    admissible commands, which the opening does not list.
    """

    def __init__(self, *, train: str = "", held_out: str = "") -> None:
        """Raises ValueError if TextWorld, a game, or ALFWorld for its games is missing."""
        self._textworld = require_package("textworld", install=INSTALL)
        self._games = read_files(games_in, train, held_out, fetch=FETCH)
        self._wrappers: list[Any] = []
        if any(path.suffix == ALFWORLD for paths in self._games.values() for path in paths):
            alfred = require_package("alfworld.agents.environment.alfred_tw_env", install=INSTALL_ALFWORLD)
            self._wrappers = [alfred.AlfredDemangler]
        self._thread: OwnThread | None = None
        self._game: Any = None  # lives in the thread

    async def reset(self, task: Task) -> Observation:
        path = item_of(task, self._games)
        await self.close()
        self._thread = OwnThread(f"textworld {path.name}")
        state = await self._thread.call(lambda: self._start(path))
        self._episode = _Episode(task=task, state=state)
        return opened(_text(state.feedback))

    async def _act(self, episode: _Episode, action: str) -> Observation:
        command = " ".join(action.lower().split())
        known = {" ".join(listed.lower().split()): listed for listed in episode.state.admissible_commands}
        if command not in known:
            return answered("Nothing happens.", {"game": 0.0}, valid=False)
        assert self._thread is not None
        episode.state, score, is_over = await self._thread.call(lambda: self._game.step(known[command]))
        text, won = _text(episode.state.feedback), bool(episode.state.won)
        return answered(text, {"game": float(score) - episode.total_reward}, terminated=is_over, score=float(won))

    async def close(self) -> None:
        thread, self._thread, self._episode = self._thread, None, None
        if thread is not None:
            await thread.call_last(self._stop)

    def admissible(self) -> list[str]:
        episode = self._started()
        return [] if episode.is_over else sorted(set(episode.state.admissible_commands))

    def state_key(self) -> str:
        """Return a hash of all facts of the game's state, and of its score: what has been rewarded is not again."""
        episode = self._started()
        facts = "\n".join([*sorted(map(str, episode.state.facts)), str(episode.total_reward)])
        return f"{episode.task.task_id} {hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()}"

    def expert(self) -> str:
        """Return the next command of the engine's own plan. Raises EnvError after the end."""
        episode = self._running()
        plan = episode.state.policy_commands
        if not plan:
            raise EnvError(f"{episode.task.task_id} has no way to win from here")
        return str(plan[0])

    def _start(self, path: Path) -> Any:
        infos = self._textworld.EnvInfos(
            feedback=True, admissible_commands=True, policy_commands=True, facts=True, won=True, lost=True, score=True
        )
        self._game = self._textworld.start(str(path), request_infos=infos, wrappers=self._wrappers)
        return self._game.reset()

    def _stop(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()


def games_in(folder: Path) -> list[Path]:
    """Return the games in the folder, sorted by path, without ALFWorld's games that have no solution."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS)
    games = [path for path in paths if path.suffix != ALFWORLD or _is_played_by_alfworld(path, folder)]
    for path in games:
        if path.suffix != ALFWORLD and not path.with_suffix(".json").exists():
            raise ValueError(f"{path} needs the {path.stem}.json that tw-make writes next to it; {FETCH}")
    if not games:
        raise ValueError(f"{folder} contains no games; {FETCH}")
    return games


def _is_played_by_alfworld(path: Path, folder: Path) -> bool:
    within = str(path.relative_to(folder).parent)
    return not any(word in within for word in LEFT_OUT) and read_json(path, _AlfredGame).solvable


def _text(feedback: str) -> str:
    """Return the feedback without TextWorld's drawing of its name."""
    return "\n".join(line.strip() for line in feedback.splitlines() if line.strip(" $\\/_|-")).strip() or "(nothing)"
