"""A disk that may be full, and that loses what was not synced: the product's own calls on a real folder."""

import errno
import os
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

from greenlet import getcurrent

from slipstream.tools.lab.sim.world import Killed, World

STEP_S = 0.003
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_FSYNC = os.fsync
_current: list["Disk"] = []


class Disk:
    """What was changed below `root` and not synced; each change takes a moment, in which its process may be killed."""

    def __init__(self, world: World, root: Path) -> None:
        self.root = root
        self.is_full = False
        self.kill_at = -1  # the change, counted from now on, before which its process is killed
        self._world = world
        self._prefix = str(root)
        self._undo: list[list[tuple[Path, bytes | None]]] = []  # names not synced: what was there before
        self._unsynced = dict[Path, None]()  # files whose bytes are not synced
        self._is_own = False

    def lose_power(self, chance: Random) -> None:
        """Forget some of what was not synced: names from some change on, and the ends of files."""
        self._is_own = True
        kept = chance.randint(0, len(self._undo))
        for change in reversed(self._undo[kept:]):
            for path, before in reversed(change):
                if before is None:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(before)
        for path in self._unsynced:
            if path.is_file():
                os.truncate(path, chance.randint(0, path.stat().st_size))
        self._undo.clear()
        self._unsynced.clear()
        self._is_own = False

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.step()
        if path.is_dir():
            self._undo = [change for change in self._undo if change[-1][0].parent != path]
        self._unsynced.pop(path, None)

    def step(self) -> None:
        """Let time pass before a change."""
        process = getcurrent().process
        self.kill_at -= 1
        if self.kill_at == 0:
            self._world.kill(process)
        self._world.sleep(STEP_S * self._world.random.random())

    def changes(self, event: str, name: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python before each change, and each opening, of a file."""
        if self._is_own or getattr(getcurrent(), "process", None) is None:
            return
        if getcurrent().process.is_dead:
            raise Killed
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        path = Path(name)
        self.step()
        if self.is_full and event in ("open", "os.mkdir") and ".writer" not in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._world.note(f"{getcurrent().process.name} {event} {str(path)[len(self._prefix) :]}")
        self._is_own = True
        if event == "open":
            self._unsynced[path] = None
            if not path.exists():
                self._undo.append([(path, None)])
        elif event == "os.rename":
            target = Path(os.fsdecode(arguments[1]))
            if path.is_file():
                before = target.read_bytes() if target.exists() else None
                self._undo.append([(path, path.read_bytes()), (target, before)])
                if path in self._unsynced:
                    del self._unsynced[path]
                    self._unsynced[target] = None
        elif event == "os.remove" and path.is_file():
            self._undo.append([(path, path.read_bytes())])
        self._is_own = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _current and (event == "open" or event in CHANGES):
        name = arguments[0]
        if not isinstance(name, int) and (path := os.fsdecode(name)).startswith(_current[0]._prefix):
            _current[0].changes(event, path, arguments)


def _fsync(descriptor: int) -> None:
    if _current and getattr(getcurrent(), "process", None) is not None:
        _current[0].fsync(descriptor)
    else:
        _FSYNC(descriptor)


def use(disk: Disk | None) -> None:
    """Let the calls of this interpreter go through the disk; None ends that."""
    if not getattr(sys, "_slipstream_disk", False):
        sys.addaudithook(_hook)
        sys._slipstream_disk = True  # type: ignore[attr-defined]
    _current[:] = [disk] if disk else []
    os.fsync = _fsync if disk else _FSYNC  # type: ignore[assignment]
