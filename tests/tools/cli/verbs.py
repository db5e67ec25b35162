"""A verb of `slipstream`, called in a process of its own, or in this one."""

from collections.abc import Callable

from tests.processes import CLI, Done, python

ASCII_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # in which no file of ours is written
Output = Callable[..., str]  # what a command in this process printed: the fixtures `printed` and `refused`


def slipstream(*arguments: str, **variables: str) -> Done:
    """From a terminal that knows no password, with these variables beside this process's own."""
    return python(*CLI, *arguments, **variables)
