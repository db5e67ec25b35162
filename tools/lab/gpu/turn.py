"""Processes that start side by side and measure one after another: none measures while another starts or measures."""

import argparse
import time
from pathlib import Path

POLL_S = 0.1
TIMEOUT_S = 300.0


def add_turn(parser: argparse.ArgumentParser) -> None:
    """The option `--turn FOLDER PLACE COUNT`: this process is number PLACE of COUNT."""
    parser.add_argument("--turn", nargs=3, metavar=("FOLDER", "PLACE", "COUNT"))


def await_turn(turn: list[str] | None) -> None:
    """Wait until all COUNT processes have started, and those before this one have ended.

    Whoever starts a process writes its files `ready-PLACE` and `done-PLACE` when it ends, however it ends.
    """
    if turn is None:
        return
    folder, place, count = Path(turn[0]), int(turn[1]), int(turn[2])
    (folder / f"ready-{place}").touch()
    awaited = [folder / f"ready-{other}" for other in range(count)] + [folder / f"done-{k}" for k in range(place)]
    deadline = time.monotonic() + TIMEOUT_S
    while not all(path.exists() for path in awaited):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still waiting for {[path.name for path in awaited if not path.exists()]}")
        time.sleep(POLL_S)
