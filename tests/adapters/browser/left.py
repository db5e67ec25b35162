"""What a browser could leave behind."""

from pathlib import Path


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
