"""`browsergym`: the tasks of BrowserGym, which include WebArena and others, in Debian's Chromium."""

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.browsergym_worker import (
    Begin,
    BrowserReply,
    BrowserRequest,
    DoAction,
    Failed,
    PageShown,
    module_of,
)
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.episode_env import Begun, EpisodeEnv, answered, opened
from slipstream.envhub.isolation.chromium import PAGES, require_chromium, require_readable, write_launcher
from slipstream.envhub.isolation.own_process import OwnProcess
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.envhub.package import require_package
from slipstream.envhub.task_seed import task_rng
from slipstream.envhub.user_files import item_of

INSTALL = "'browsergym-core==0.14.3'"
MINIWOB = "browsergym/miniwob."
MAX_ANSWER_BYTES = 8 << 20


class _Worker:
    """A process that runs BrowserGym, and a thread that talks to it. Every failure is an EnvError."""

    def __init__(self, *, pages: Path | None, sites: Sequence[str]) -> None:
        self._process = OwnProcess(name="browsergym")
        folder = self._process.folder
        write_launcher(folder / "chromium", pages=pages, sites=sites)
        ours, theirs = socket.socketpair()
        env = dict(os.environ) | {"PLAYWRIGHT_BROWSERS_PATH": str(folder / "browsers")}
        if pages is not None:
            env["MINIWOB_URL"] = f"file://{PAGES}/miniwob/"
        program = [sys.executable, "-P", "-m", "slipstream.envhub.adapters.browsergym_worker"]
        with theirs:
            fd = theirs.fileno()
            self._process.start([*program, str(fd), folder / "chromium"], env=env, pass_fds=[fd])
        self._stream = ours.makefile("rwb")
        ours.close()  # the stream keeps the socket open
        self._thread = OwnThread("browsergym")
        self._replies: msgspec.json.Decoder[BrowserReply] = msgspec.json.Decoder(BrowserReply)

    async def request(self, request: BrowserRequest) -> PageShown:
        reply = await self._thread.call(lambda: self._exchange(request))
        if isinstance(reply, Failed):
            raise EnvError(f"BrowserGym failed: {reply.why}")
        return reply

    def end(self) -> None:
        """Kill the process, also in the middle of a request: the thread then ends too."""
        self._process.end()
        self._thread.end()
        with contextlib.suppress(OSError):
            self._stream.close()

    def _exchange(self, request: BrowserRequest) -> BrowserReply:
        try:
            self._stream.write(msgspec.json.encode(request) + b"\n")
            self._stream.flush()
            message = self._stream.readline(MAX_ANSWER_BYTES)
            return self._replies.decode(message)
        except (OSError, ValueError, *MALFORMED) as error:  # ValueError: `end` has closed the stream
            raise EnvError(f"BrowserGym's process is lost: {error}; its log: {self._process.log_tail()}") from error


class BrowserGymEnv(EpisodeEnv[Begun]):
    """One task. The reward component is `task`: BrowserGym's own, each turn; the score is their sum, in [0, 1].

    Options: `train` and `held_out`, ids of tasks, used in turn, each with a new seed (without `held_out`, its tasks are
    those of `train` with other seeds); `sites`, the hosts, or host:port, that the browser may reach, none by default;
    `settings`, further arguments of `gymnasium.make`.
    """

    def __init__(
        self,
        *,
        train: Sequence[str] = (f"{MINIWOB}enter-text",),
        held_out: Sequence[str] = (),
        sites: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError if BrowserGym or Chromium is missing, or a task is not registered."""
        require_package("browsergym", install=INSTALL)
        require_chromium()
        self._games = {"train": tuple(train), "held_out": tuple(held_out or train)}
        self._sites, self._settings = tuple(sites), dict(settings or {})
        for game in {*self._games["train"], *self._games["held_out"]}:
            _check_registered(game)
        self._pages = _miniwob_pages(self._games["train"] + self._games["held_out"])
        self._worker: _Worker | None = None

    async def reset(self, task: Task) -> Observation:
        game = item_of(task, self._games)
        seed = task_rng(task, world=f"browsergym/{game}").getrandbits(31)
        self._worker = self._worker or _Worker(pages=self._pages, sites=self._sites)
        shown = await self._worker.request(Begin(game=game, seed=seed, settings=self._settings))
        self._episode = Begun(task=task)
        return opened(f"{shown.goal}\n\n{shown.page}", rules=shown.rules)

    async def _act(self, episode: Begun, action: str) -> Observation:
        assert self._worker is not None
        shown = await self._worker.request(DoAction(action=action))
        is_over = shown.terminated or shown.truncated
        score = min(1.0, max(0.0, episode.total_reward + shown.reward)) if is_over else 0.0
        text = "the task is over" if is_over else shown.page
        return answered(
            f"{shown.error}\n\n{text}" if shown.error else text,
            {"task": shown.reward},
            valid=not shown.error,
            terminated=shown.terminated,
            truncated=shown.truncated,
            score=score,
        )

    async def close(self) -> None:
        worker, self._worker, self._episode = self._worker, None, None
        if worker is not None:
            await asyncio.to_thread(worker.end)


def _check_registered(game: str) -> None:
    """Raise ValueError unless a package of BrowserGym registers `game`."""
    benchmark = game.removeprefix("browsergym/").partition(".")[0]
    if not game.startswith("browsergym/") or not benchmark.isidentifier():
        raise ValueError(
            f"`env.options.train` and `held_out` must be BrowserGym's ids, such as browsergym/webarena.4, got {game!r}"
        )
    require_package(module_of(game), install=f"browsergym-{benchmark}")
    gymnasium = require_package("gymnasium", install=INSTALL)
    try:
        gymnasium.spec(game)
    except gymnasium.error.Error as error:
        raise ValueError(
            f"`env.options` has the task {game!r}, which BrowserGym does not know: {error}; use a registered id"
        ) from error


def _miniwob_pages(games: Sequence[str]) -> Path | None:
    """Return the folder of MiniWoB++'s pages if one of `games` needs it and MINIWOB_URL is not set."""
    if "MINIWOB_URL" in os.environ or not any(game.startswith(MINIWOB) for game in games):
        return None
    found = importlib.util.find_spec("miniwob")
    if found is None or found.origin is None:
        raise ValueError(
            "BrowserGym needs MiniWoB++'s own pages: run `pip install miniwob==1.1.0` in the environment of the "
            "actors, or set MINIWOB_URL to the URL of the pages, and add its host to `env.options.sites`"
        )
    pages = Path(found.origin).parent / "html"
    require_readable(pages)
    return pages
