"""A clock of its own for a server, which a fault sets: libfaketime reads the difference from a file."""

from pathlib import Path

FOLDER = Path("/usr/lib")
LIBRARY = "*/faketime/libfaketime.so.1"
REFRESH_S = 1  # the server notices a change after this time


class Clock:
    """The wall clock of the processes that `program` starts; their monotonic clock is the machine's."""

    def __init__(self, directory: Path, program: str) -> None:
        """`directory` gets a program of the same name as `program`, which starts it with this clock.

        Raises FileNotFoundError.
        """
        library = next(FOLDER.glob(LIBRARY), None)
        if library is None:
            raise FileNotFoundError(f"{FOLDER / LIBRARY} is missing; install it: apt-get install libfaketime")
        directory.mkdir(parents=True)
        self.directory = directory
        self._difference = directory / "difference"
        self.set(0)
        started = directory / Path(program).name
        started.write_text(
            f"#!/bin/sh\nexec env LD_PRELOAD={library} DONT_FAKE_MONOTONIC=1 FAKETIME_CACHE_DURATION={REFRESH_S} "
            f"FAKETIME_TIMESTAMP_FILE='{self._difference}' '{program}' \"$@\"\n"
        )
        started.chmod(0o755)

    def set(self, difference_s: int) -> None:
        """Set it to so many seconds after the machine's clock."""
        self.difference_s = difference_s
        new = self._difference.with_suffix(".new")
        new.write_text(f"{difference_s:+d}\n")
        new.replace(self._difference)
