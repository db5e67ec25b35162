"""Two processes that write checkpoints into one folder: the later one has it, wherever the earlier one is."""

import os
import threading
from pathlib import Path

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.learner.checkpoint.fence import Fence
from slipstream.replay.records.keys import FencedOut
from tests.processes import DEADLINE_S


def taken(folder: Path) -> Fence:
    fence = Fence(folder)
    fence.take()
    return fence


def test_a_write_under_way_ends_before_another_process_takes_over_and_is_the_last(tmp_path: Path) -> None:
    first, second = taken(tmp_path / "checkpoints"), Fence(tmp_path / "checkpoints")
    taker = threading.Thread(target=second.take)
    with first.held():
        taker.start()
        taker.join(timeout=0.2)
        assert taker.is_alive()
    taker.join(timeout=DEADLINE_S)
    with second.held():
        pass
    with pytest.raises(FencedOut, match="another learner has taken over"), first.held():
        pass


def test_a_process_that_was_stopped_in_a_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.checkpoint.fence.TAKEOVER_TIMEOUT_S", 0.2)
    first = taken(tmp_path / "checkpoints")
    with first.held(), pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* has held .*checkpoints.writer"):
        taken(tmp_path / "checkpoints")
    taken(tmp_path / "checkpoints")
