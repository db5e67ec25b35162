"""A command in a sandbox, with limits that suit a test."""

import asyncio
from pathlib import Path

import psutil

from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.isolation.sandbox import Finished, Limits, Place, run_in_sandbox

LIMITS = Limits(wall_s=20)
TREE: Tree = {"a": folder(), "a/x.txt": file("hi\n"), "run.sh": file("echo yes\n", 0o755)}


def run(
    command: str, tree: Tree = TREE, *, place: Place = Place.HOME, base: Path | None = None, **limits: float
) -> Finished:
    given = Limits(**{"wall_s": 20, **limits})  # type: ignore[arg-type]
    return asyncio.run(run_in_sandbox(command, tree, limits=given, place=place, base=base))


def allowed(*commands: str, tree: Tree = TREE, place: Place = Place.HOME) -> list[str]:
    """Those of `commands`, which one sandbox runs in a row, that do not say that they have failed."""
    tried = (f"{{ {command}; }} >/dev/null 2>&1 || echo {number}" for number, command in enumerate(commands))
    failed = run("\n".join(tried), tree, place=place).output.split()
    return [command for number, command in enumerate(commands) if str(number) not in failed]


def running(marker: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or [])]
