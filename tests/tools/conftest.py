"""Verbs in this process: one that succeeds, and one that refuses what it was given."""

from collections.abc import Sequence

import pytest

from slipstream.tools.cli.cli import main
from tests.tools.cli.verbs import Output


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command that must succeed; returns what it printed."""
    return lambda *words: _run(words, capsys, code=0)[0]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command that must end with code 2; returns its complaint."""
    return lambda *words: _run(words, capsys, code=2)[1]


def _run(words: Sequence[str], capsys: pytest.CaptureFixture[str], *, code: int) -> tuple[str, str]:
    """What the command wrote to stdout, and to stderr."""
    capsys.readouterr()
    assert main([*words]) == code
    return capsys.readouterr()
