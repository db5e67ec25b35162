"""Verbs in this process: one that succeeds, and one that refuses what it was given."""

import pytest

from slipstream.tools.cli.cli import main
from tests.tools.cli.verbs import Output


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command that must succeed; returns what it printed."""

    def printed(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command that must end with code 2; returns its complaint."""

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 2
        return capsys.readouterr().err

    return refused
