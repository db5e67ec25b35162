"""Verbs in this process: one that succeeds, one that refuses what it was given, and one that is interrupted."""

import signal
from collections.abc import Iterator, Sequence

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


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """It interrupts, also where these tests were started in the background, which hears none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _run(words: Sequence[str], capsys: pytest.CaptureFixture[str], *, code: int) -> tuple[str, str]:
    """What the command wrote to stdout, and to stderr."""
    capsys.readouterr()
    assert main([*words]) == code
    return capsys.readouterr()
