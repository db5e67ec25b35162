"""What a browser could leave behind, and ways to wait until it has not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 60.0
T = TypeVar("T")


def processes_of(name: str) -> set[int]:
    """The processes that one of an adapter's folders is an argument of, by the adapter's name."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if f"/slipstream-{name}-".encode() in words:
            found.add(int(path.parent.name))
    return found


def folders_of(name: str) -> set[Path]:
    return set(Path("/tmp").glob(f"slipstream-{name}-*"))


def until(look: Callable[[], T]) -> T:
    """What `look` sees as soon as it sees something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return seen
