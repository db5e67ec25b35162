"""`browsergym`: the tasks of BrowserGym, and so of WebArena and others, in Debian's Chromium."""

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.asset import item_of
from envhub.adapters.browsergym_worker import Act, Answer, Ask, Begin, Failed, Shown, module_of
from envhub.isolation.chromium import PAGES, require_chromium, require_readable, write_launcher
from envhub.env import EnvError, Observation
from envhub.isolation.own_process import OwnProcess
from envhub.isolation.own_thread import OwnThread
from envhub.package import require_package
from envhub.replayed_env import ReplayedEnv
from envhub.task_seed import task_rng

INSTALL = "'browsergym-core==0.14.3'"
MINIWOB = "browsergym/miniwob."
MAX_ANSWER_BYTES = 8 << 20


@dataclass(kw_only=True, slots=True)
class _Episode:
    task: Task
    shown: Shown
    total_reward: float = 0.0
    is_over: bool = False


class _Worker:
    """A process with BrowserGym in it, and a thread that asks it. Whatever goes wrong is an EnvError."""

    def __init__(self, *, pages: Path | None, sites: Sequence[str]) -> None:
        self._process = OwnProcess(name="browsergym")
        folder = self._process.folder
        write_launcher(folder / "chromium", pages=pages, sites=sites)
        ours, theirs = socket.socketpair()
        env = dict(os.environ) | {"PLAYWRIGHT_BROWSERS_PATH": str(folder / "browsers")}
        if pages is not None:
            env["MINIWOB_URL"] = f"file://{PAGES}/miniwob/"
        with theirs:
            self._process.start(
                [sys.executable, "-m", "envhub.adapters.browsergym_worker", str(theirs.fileno()), folder / "chromium"],
                env=env,
                pass_fds=[theirs.fileno()],
            )
        self._line = ours.makefile("rwb")
        ours.close()  # the file has it
        self._thread = OwnThread("browsergym")
        self._answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)

    async def ask(self, ask: Ask) -> Shown:
        answer = await self._thread.call(lambda: self._exchanged(ask))
        if isinstance(answer, Failed):
            raise EnvError(f"BrowserGym fails: {answer.why}")
        return answer

    def end(self) -> None:
        """Kill it, whatever it is at: the thread then ends too."""
        self._process.end()
        self._thread.end()
        with contextlib.suppress(OSError):
            self._line.close()

    def _exchanged(self, ask: Ask) -> Answer:
        try:
            self._line.write(msgspec.json.encode(ask) + b"\n")
            self._line.flush()
            message = self._line.readline(MAX_ANSWER_BYTES)
            return self._answers.decode(message)
        except (OSError, msgspec.MsgspecError) as error:
            raise EnvError(f"BrowserGym's process is lost: {error}; it said: {self._process.said()}") from error


class BrowserGymEnv(ReplayedEnv[_Episode]):
    """One task. The reward component is `task`: BrowserGym's own, each turn; the score is their sum, in [0, 1].

    Options: `train` and `held_out`, ids of tasks, used by turns, a seed each (without `held_out`, its tasks are those
    of `train` with other seeds); `sites`, the hosts, or host:port, that the browser may reach, none by default;
    `settings`, what `gymnasium.make` is given beside the id.
    """

    def __init__(
        self,
        *,
        train: Sequence[str] = (f"{MINIWOB}enter-text",),
        held_out: Sequence[str] = (),
        sites: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError where BrowserGym or Chromium is missing, and for a task that is not registered."""
        super().__init__()
        require_package("browsergym", install=INSTALL)
        require_chromium()
        self._games = {"train": tuple(train), "held_out": tuple(held_out or train)}
        self._sites, self._settings = tuple(sites), dict(settings or {})
        for game in {*self._games["train"], *self._games["held_out"]}:
            _check_registered(game)
        self._pages = _miniwob_pages(self._games["train"] + self._games["held_out"])
        self._worker: _Worker | None = None

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises ValueError for a split that does not exist, EnvError where it cannot be started."""
        game = item_of(task, self._games)
        seed = task_rng(task, world=f"browsergym/{game}").getrandbits(31)
        self._worker = self._worker or _Worker(pages=self._pages, sites=self._sites)
        shown = await self._worker.ask(Begin(game=game, seed=seed, settings=self._settings))
        self._episode = _Episode(task=task, shown=shown)
        opening = f"{shown.goal}\n\n{shown.page}"
        return Observation(messages=(Message("system", shown.rules), Message("user", opening)), rewards={})

    async def step(self, action: str) -> Observation:
        """Do `action`. Raises EnvError before a reset, after the end, and where BrowserGym or the browser fails."""
        episode = self._running()
        assert self._worker is not None
        shown = episode.shown = await self._worker.ask(Act(action=action))
        episode.total_reward += shown.reward
        episode.is_over = shown.terminated or shown.truncated
        score = min(1.0, max(0.0, episode.total_reward)) if episode.is_over else 0.0
        text = "the task is over" if episode.is_over else shown.page
        return Observation(
            messages=(Message("user", f"{shown.error}\n\n{text}" if shown.error else text),),
            rewards={"task": shown.reward},
            terminated=shown.terminated,
            truncated=shown.truncated and not shown.terminated,
            valid_action=not shown.error,
            score=score,
            success=score == 1.0,
        )

    async def close(self) -> None:
        worker, self._worker, self._episode = self._worker, None, None
        if worker is not None:
            await asyncio.to_thread(worker.end)


def _check_registered(game: str) -> None:
    """Raise ValueError unless a package of BrowserGym's registers `game`."""
    benchmark = game.removeprefix("browsergym/").partition(".")[0]
    if not game.startswith("browsergym/") or not benchmark.isidentifier():
        raise ValueError(f"`env.options` name tasks by BrowserGym's ids, such as browsergym/webarena.4, got {game!r}")
    require_package(module_of(game), install=f"browsergym-{benchmark}")
    gymnasium = require_package("gymnasium", install=INSTALL)
    try:
        gymnasium.spec(game)
    except gymnasium.error.Error as error:
        raise ValueError(f"`env.options` name {game!r}, which BrowserGym has not: {error}") from error


def _miniwob_pages(games: Sequence[str]) -> Path | None:
    """The folder of MiniWoB++'s pages, where one of `games` shows them and MINIWOB_URL does not say where else."""
    if "MINIWOB_URL" in os.environ or not any(game.startswith(MINIWOB) for game in games):
        return None
    found = importlib.util.find_spec("miniwob")
    if found is None or found.origin is None:
        raise ValueError(
            "BrowserGym needs MiniWoB++'s own pages: run `pip install miniwob==1.1.0` in the environment of the "
            "actors, or say in MINIWOB_URL where they are served, and name that host in `env.options.sites`"
        )
    pages = Path(found.origin).parent / "html"
    require_readable(pages)
    return pages
