"""A verb of `slipstream`, called in a process of its own, or in this one."""

import os
import subprocess
import sys
from collections.abc import Callable

from slipstream.common.process.connection import PASSWORD_VARIABLE
from tests.processes import DEADLINE_S, REPOSITORY

ASCII_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # in which no file of ours is written
Output = Callable[..., str]  # what a command in this process printed: the fixtures `printed` and `refused`
SLIPSTREAM = [sys.executable, "-m", "slipstream.tools.cli.cli"]


def slipstream(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """From a terminal that knows no password, with these variables beside this process's own."""
    environment = {name: value for name, value in os.environ.items() if name != PASSWORD_VARIABLE} | variables
    return subprocess.run(
        [*SLIPSTREAM, *arguments], cwd=REPOSITORY, env=environment, timeout=DEADLINE_S, capture_output=True, text=True
    )
