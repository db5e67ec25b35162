"""The supervisor of a host: an actor in each slot, more and fewer of them, and what becomes of those that end."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run import child as child_module
from slipstream.tools.run import devices as devices_module
from slipstream.tools.run.actor_host import Host
from slipstream.tools.run.devices import visible_devices

DEADLINE_S = 60.0
# A stand-in for an actor: it writes its name and its GPU to a file, then waits for SIGTERM.
STAND_IN = """
echo "$1 gpu=$CUDA_VISIBLE_DEVICES" >> "$0"
trap 'test -e "$0.stays" || exit 75' TERM
while true; do sleep 0.02; done
"""


class Stage:
    """A host of stand-ins, and the file that they write to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._hosts = folder, list[Host]()
        self.journal = folder / "journal"
        self.journal.touch()
        self.stays = folder / "journal.stays"  # while this file exists, stand-ins ignore SIGTERM

    def host(self, *settings: str, count: int, devices: list[str], script: str = STAND_IN) -> Host:
        settings = (f"actors.count={count}", "actors.drain_s=0", *settings)
        config = load_config(None, [f"run.root={self._folder}", *settings])
        self._hosts.append(Host(config, lambda name: ["sh", "-c", script, str(self.journal), name], devices=devices))
        return self._hosts[-1]

    def started(self) -> list[str]:
        """Name and GPU of every life so far, in order of their numbers."""
        prefix = re.escape(f"{socket.gethostname()}-{os.getpid()}-") + "[0-9a-f]{8}-"
        return sorted(re.sub(prefix, "", line) for line in self.journal.read_text().splitlines())

    def tended(self, host: Host, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, self.started()
            assert host.update() is None
            time.sleep(0.01)

    def end(self) -> None:
        self.stays.unlink(missing_ok=True)
        for host in self._hosts:
            host.end()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(child_module, "BACK_OFF_S", (0.0,) * 5)
    stage = Stage(tmp_path)
    yield stage
    stage.end()


def test_each_gpu_has_an_engine_of_its_own(stage: Stage) -> None:
    host = stage.host(count=3, devices=["0", "1", "GPU-5d3f"])
    stage.tended(host, lambda: stage.started() == ["0 gpu=0", "1 gpu=1", "2 gpu=GPU-5d3f"])


def test_an_engine_may_have_several_gpus_and_what_is_left_over_stays_idle(stage: Stage) -> None:
    host = stage.host("actors.tensor_parallel=2", count=1, devices=["0", "1", "2", "3", "4"])
    host.want(9)
    stage.tended(host, lambda: stage.started() == ["0 gpu=0,1", "1 gpu=2,3"])


def test_engines_share_a_gpu_only_if_they_limit_their_memory(stage: Stage) -> None:
    with pytest.raises(ConfigError, match=r"`actors.tensor_parallel` must be <= 2, the GPUs of this host, got 4"):
        stage.host("actors.tensor_parallel=4", count=1, devices=["0", "1"])
    with pytest.raises(ConfigError, match=r"`actors.count` must be <= 2 for the GPUs of this host \(0, 1\), got 3, "):
        stage.host(count=3, devices=["0", "1"])
    host = stage.host("actors.kv_cache_bytes=4294967296", count=2, devices=["0"])
    stage.tended(host, lambda: stage.started() == ["0 gpu=0", "1 gpu=0"])


def test_more_are_started_and_the_last_are_told_to_leave_as_is_wanted(stage: Stage) -> None:
    host = stage.host(count=1, devices=["0", "1", "2"])
    host.want(0)
    assert host.count == 1
    stage.tended(host, lambda: stage.started() == ["0 gpu=0"])
    host.want(9)
    assert host.count == 3
    stage.tended(host, lambda: len(stage.started()) == 3)
    stage.stays.touch()
    host.want(1)
    host.update()
    host.want(2)
    for _ in range(20):
        host.update()
        time.sleep(0.01)
    assert len(stage.started()) == 3  # the one that leaves still holds its GPU
    stage.stays.unlink()
    for slot in (1, 2):
        host._slots[slot].ask_to_end()
    stage.tended(host, lambda: len(stage.started()) == 4)
    assert stage.started()[3] == "3 gpu=1"
    stage.tended(host, lambda: len(host._slots) == 2)


def test_what_crashed_is_started_again_under_a_new_name(stage: Stage) -> None:
    host = stage.host(count=1, devices=[])
    stage.tended(host, lambda: len(stage.started()) == 1)
    host._slots[0].send(signal.SIGKILL)
    stage.tended(host, lambda: len(stage.started()) == 2)
    assert [life.split()[0] for life in stage.started()] == ["0", "1"]


def test_two_hosts_of_one_name_and_process_id_have_actors_of_different_names(stage: Stage) -> None:
    """As containers may be."""
    for host in (stage.host(count=1, devices=[]), stage.host(count=1, devices=[])):
        before = len(stage.started())
        stage.tended(host, lambda before=before: len(stage.started()) > before)  # type: ignore[misc]
    assert len(set(stage.journal.read_text().splitlines())) == 2


def test_a_host_is_done_when_every_actor_has_ended_with_its_run(stage: Stage) -> None:
    host = stage.host(count=2, devices=[], script='echo "$1" >> "$0"')
    stage.tended(host, lambda: host.is_done)
    assert len(stage.started()) == 2
    assert stage.host(count=0, devices=[]).is_done


def test_crashes_before_a_long_good_time_count_no_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "STABLE_S", 0.0)
    host = stage.host(count=1, devices=[], script='echo "$1" >> "$0"; exit 1')
    stage.tended(host, lambda: len(stage.started()) > 2 * child_module.MAX_RESTARTS)


def test_the_gpus_are_those_that_are_visible_else_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-5d3f")
    assert visible_devices() == ["2", "GPU-5d3f"]
    for without in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", without)
        assert visible_devices() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\necho 1\n")
    tool.chmod(0o700)
    assert visible_devices() == ["0", "1"]
    tool.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    with pytest.raises(ConfigError, match=r"failed to list the GPUs \(no driver\).*`actors.devices`"):
        visible_devices()
    tool.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(devices_module, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"failed to list the GPUs \(.* timed out .*\).*`actors.devices`"):
        visible_devices()
