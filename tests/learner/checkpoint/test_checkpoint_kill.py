"""A learner killed in the middle of a checkpoint comes to what it would have come to, wherever it was in it.

No actor and no Redis: the learner trains on an archive that is made here. Its disk is slow, so that it is in the middle
of a checkpoint for most of the time, and it is stopped, looked at, and let go or killed.
"""

import contextlib
import fcntl
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.common.records.trajectory import Trajectory, pack_logprobs, pack_tokens
from slipstream.learner.checkpoint.checkpoint import MANIFEST
from slipstream.replay.records.ticket import Group, Lease
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.replay.server.server_settings import free_port
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.processes import DEADLINE_S, MARK, Process, customized, marked
from tests.replay.records.attempts import attempt_at, lease_of, ticket

RUN = "original"
NUM_STEPS = 20
SETTINGS = [f"learner.steps={NUM_STEPS}", "learner.checkpoint_every=1", "model.max_tokens=64", "optim.lr=1e-3"]
SETTINGS += ["learner.micro_batch_tokens=64", "sampling.max_turn_tokens=8"]
SETTINGS += ["objective.max_negative_kl=0", "objective.guard=false"]
# Every process that finds it runs it at its start: a sync takes as long as on a busy disk.
SLOW_DISK = """
import os, time
sync = os.fsync
def fsync(file):
    time.sleep(0.1)
    sync(file)
os.fsync = fsync
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: the one with the archive, and "steady", trained on it by one rank without a break."""
    root = tmp_path_factory.mktemp("runs")
    original = RunDir(root, RUN)
    original.create()
    config = Config()
    config.run.name, config.run.root = RUN, str(root)
    original.config.write_text(dump_config(config))
    shape = TinyShape(hidden_size=128, intermediate_size=512, num_layers=2, num_heads=2, num_kv_heads=2)
    make_tiny_model(original.model, texts=["a b c d e f g h"], shape=shape, max_tokens=64, seed=0)
    archive = ArchiveWriter(original.trajectories, RUN, epoch=1)
    for step in range(1, NUM_STEPS + 1):
        groups = [a_group(group_id) for group_id in (2 * step, 2 * step + 1)]
        archive.append(ArchivedStep(step=step, policy_version=step - 1, conditions={}, groups=groups))
    archive.sync()
    (root / "slow" / "disk").mkdir(parents=True)
    (root / "slow" / "disk" / "sitecustomize.py").write_text(SLOW_DISK)
    with learner(root, "steady", slow=False) as steady:
        assert steady.wait() == 0, steady.last_words()
    return root


def a_group(group_id: int) -> Group:
    """Four attempts of unlike lengths and returns, each with tokens of its own."""
    owned = ticket(group_id, num_members=4)
    return Group(ticket=owned, num_uses=1, trajectories=[an_attempt(lease_of(owned), member) for member in range(4)])


def an_attempt(lease: Lease, member: int) -> Trajectory:
    rng = np.random.default_rng((lease.ticket.group_id, member))
    num_sampled = 4 + 3 * member
    attempt = attempt_at(lease, member, run_id=RUN, num_sampled=num_sampled)
    (turn,) = attempt.turns
    return msgspec.structs.replace(
        attempt,
        tokens=pack_tokens(rng.integers(0, 10, 2 + num_sampled).tolist()),
        behaviour_logprobs=pack_logprobs([0.0, 0.0, *rng.normal(-2.5, 0.3, num_sampled).tolist()]),
        turns=[msgspec.structs.replace(turn, rewards={"task": float(member % 3)})],
    )


@contextlib.contextmanager
def learner(root: Path, name: str, *settings: str, slow: bool, mark: str = "") -> Iterator[Process]:
    """A learner that trains run `name` on the archive; whatever is left of it in the end is killed.

    `mark` tells the processes of one of several hosts from the others.
    """
    arguments = ["--replay-archive", RUN, f"run.root={root}", f"run.name={name}", *SETTINGS, *settings]
    environment = {MARK: mark or name} | (customized(root / "slow" / "disk") if slow else {})
    command = [sys.executable, "-m", "slipstream.tools.cli.cli", "learner", *arguments]
    process = Process(name, command, log=RunDir(root, name).log(mark or "test"), environment=environment)
    try:
        yield process
    finally:
        send(signal.SIGKILL, marked(mark or name))
        process.kill()


@contextlib.contextmanager
def two_hosts(root: Path, name: str) -> Iterator[list[Process]]:
    """A learner with a rank on each of two hosts, which are on this machine."""
    shared = ["learner.ranks=2", "learner.hosts=2", f"learner.rendezvous=127.0.0.1:{free_port()}"]
    hosts = [learner(root, name, *shared, f"learner.host_rank={n}", slow=False, mark=f"{name}-{n}") for n in (0, 1)]
    with hosts[0] as first, hosts[1] as second:
        yield [first, second]


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill_where(root: Path, name: str, is_there: Callable[[RunDir], bool], process: Process) -> int:
    """Kill every process of run `name` where `is_there`, and return the step of its newest checkpoint."""
    send(signal.SIGKILL, stop_where(root, name, is_there, process))
    process.kill()
    assert is_there(RunDir(root, name)), "it was not where it was looked at"
    return max(whole_checkpoints(RunDir(root, name)))


def stop_where(root: Path, name: str, is_there: Callable[[RunDir], bool], process: Process) -> Sequence[psutil.Process]:
    """Stop every process of run `name` where `is_there`, and return them."""
    run_dir, deadline = RunDir(root, name), time.monotonic() + DEADLINE_S
    while not whole_checkpoints(run_dir) and process.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.01)
    everyone = marked(name)  # once, as it takes long: from here on there are no new ones
    while process.exit_code is None and time.monotonic() < deadline:
        if is_there(run_dir):
            send(signal.SIGSTOP, everyone)
            wait_until_stopped(everyone)
            if is_there(run_dir):
                return everyone
            send(signal.SIGCONT, everyone)
        time.sleep(0.001)
    pytest.fail(f"it was never there; {process.last_words()}")


def wait_until_stopped(processes: Sequence[psutil.Process]) -> None:
    """A stop is asked for: what runs on another core may continue for a moment, and might take the fence meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)


def whole_checkpoints(run_dir: RunDir) -> list[int]:
    return [int(path.parent.name.removeprefix("step_")) for path in run_dir.checkpoints.glob(f"step_*/{MANIFEST}")]


def half_checkpoint(run_dir: RunDir) -> Path | None:
    """The folder of the one that is being written, once another is whole."""
    whole, folders = whole_checkpoints(run_dir), sorted(run_dir.checkpoints.glob("step_*"))
    newest = folders[-1] if folders and whole else None
    return newest if newest and not (newest / MANIFEST).exists() and newest.name > "step_000004" else None


def shard_bytes(folder: Path) -> int:
    """Of all shards; 0 while there is none."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def shards_are_missing(run_dir: RunDir) -> bool:
    half = half_checkpoint(run_dir)
    return half is not None and shard_bytes(half) < shard_bytes(run_dir.checkpoints / whole_name(run_dir))


def shards_are_missing_and_the_fence_is_free(run_dir: RunDir) -> bool:
    """A learner that is stopped while it holds the fence lets no other take over: see `test_fence`."""
    with run_dir.checkpoints.with_suffix(".writer").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file lets go of it
        except BlockingIOError:
            return False
        return shards_are_missing(run_dir)


def shards_are_written_and_no_manifest(run_dir: RunDir) -> bool:
    half = half_checkpoint(run_dir)
    return half is not None and shard_bytes(half) == shard_bytes(run_dir.checkpoints / whole_name(run_dir)) > 0


def manifest_is_written_and_nobody_told(run_dir: RunDir) -> bool:
    """What is done once a checkpoint is durable, the tally, is older than the manifest."""
    whole = whole_checkpoints(run_dir)
    if not whole or max(whole) < 5:
        return False
    with contextlib.suppress(FileNotFoundError):
        manifest = run_dir.checkpoints / whole_name(run_dir) / MANIFEST
        return run_dir.tally.stat().st_mtime_ns < manifest.stat().st_mtime_ns
    return False


def books(run_dir: RunDir) -> dict[Path, int]:
    """What says which steps are durable, and when each was written."""
    files = [run_dir.tally, *run_dir.checkpoints.glob(f"step_*/{MANIFEST}")]
    return {path: path.stat().st_mtime_ns for path in files}


def whole_name(run_dir: RunDir) -> str:
    return f"step_{max(whole_checkpoints(run_dir)):06d}"


POINTS = [  # of which the test of one and two ranks has the first two
    pytest.param(shards_are_missing, marks=pytest.mark.long),
    pytest.param(shards_are_written_and_no_manifest, marks=pytest.mark.long),
    manifest_is_written_and_nobody_told,
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_there", POINTS)
def test_a_learner_killed_in_a_checkpoint_reaches_the_same_bits(root: Path, is_there: Callable[[RunDir], bool]) -> None:
    name = is_there.__name__
    with learner(root, name, slow=True) as killed:
        newest = kill_where(root, name, is_there, killed)
    assert 0 < newest < NUM_STEPS and not RunDir(root, name).trained_model.exists()
    with learner(root, name, slow=False) as resumed:
        assert resumed.wait() == 0, resumed.last_words()
    assert f"resumed from step_{newest:06d}" in resumed.said()
    assert weights(root, name) == weights(root, "steady")
    assert losses(root, name) == losses(root, "steady")
    assert not any((RunDir(root, name).checkpoints).glob("*/*.tmp"))


@pytest.mark.timeout(1800)
def test_stopped_in_a_checkpoint_while_another_learner_takes_over_it_finishes_none(root: Path) -> None:
    name = "taken_over"
    run_dir = RunDir(root, name)
    with learner(root, name, slow=True) as first:
        stopped = stop_where(root, name, shards_are_missing_and_the_fence_is_free, first)
        newest = max(whole_checkpoints(run_dir))
        with learner(root, name, slow=False) as second:
            assert second.wait() == 0, second.last_words()
            assert f"resumed from step_{newest:06d}" in second.said()
            left = books(run_dir)
            send(signal.SIGCONT, stopped)
            assert first.wait() not in (0, None)
    assert "another learner has taken over" in first.said()
    assert books(run_dir) == left
    assert weights(root, name) == weights(root, "steady")


@pytest.mark.timeout(1800)
def test_killed_in_checkpoints_on_one_rank_and_on_two_it_has_the_same_losses(root: Path) -> None:
    """1 -> 2 -> 1 ranks."""
    name = "changing"
    with learner(root, name, slow=True) as first:
        newest = kill_where(root, name, shards_are_missing, first)
    with learner(root, name, "learner.ranks=2", slow=True) as second:
        run_on = kill_where(root, name, past(newest + 4, shards_are_written_and_no_manifest), second)
    assert newest + 4 <= run_on < NUM_STEPS - 2
    with learner(root, name, slow=False) as third:
        assert third.wait() == 0, third.last_words()
    assert "learner.ranks" in third.said() and f"resumed from step_{run_on:06d}" in third.said()
    found, expected = losses(root, name), losses(root, "steady")
    assert len(found) == NUM_STEPS
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert weights(root, name) != weights(root, "steady")  # else two ranks had no part in it


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hosts_stop_together_at_a_signal_end_together_when_one_is_lost_and_resume(root: Path) -> None:
    name = "two_hosts"
    run_dir = RunDir(root, name)
    with two_hosts(root, name) as hosts:
        wait_until(lambda: bool(whole_checkpoints(run_dir)), hosts)
        hosts[1].send(signal.SIGTERM)
        assert [host.wait() for host in hosts] == [EXIT_PREEMPTED, EXIT_PREEMPTED]
    stopped = max(whole_checkpoints(run_dir))
    assert stopped == len(losses(root, name)) < NUM_STEPS - 4
    with two_hosts(root, name) as hosts:
        wait_until(lambda: max(whole_checkpoints(run_dir)) > stopped, hosts)
        send(signal.SIGKILL, marked(f"{name}-1"))
        assert hosts[0].wait() not in (0, None), hosts[0].last_words()
    newest = max(whole_checkpoints(run_dir))
    assert stopped < newest < NUM_STEPS and f"resumed from step_{stopped:06d}" in hosts[0].said()
    with two_hosts(root, name) as hosts:
        assert [host.wait() for host in hosts] == [0, 0], "\n".join(host.last_words() for host in hosts)
    assert f"resumed from step_{newest:06d}" in hosts[0].said()
    assert losses(root, name) == pytest.approx(losses(root, "steady"), rel=1e-4, abs=1e-6)
    assert weights(root, name) != weights(root, "steady")  # else the second host had no part in it


def test_several_hosts_need_an_address_to_meet_at(root: Path) -> None:
    with learner(root, "nowhere", "learner.ranks=2", "learner.hosts=2", "learner.host_rank=1", slow=False) as alone:
        assert alone.wait() == EXIT_BAD_INPUT
    assert "`learner.rendezvous` is empty, with `learner.hosts` 2; name an address of host 0" in alone.said()


def wait_until(holds: Callable[[], bool], processes: Sequence[Process]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline or any(process.exit_code is not None for process in processes):
            pytest.fail("\n".join(process.last_words() for process in processes))
        time.sleep(0.02)


def past(step: int, is_there: Callable[[RunDir], bool]) -> Callable[[RunDir], bool]:
    return lambda run_dir: max(whole_checkpoints(run_dir), default=0) >= step and is_there(run_dir)


def weights(root: Path, name: str) -> bytes:
    return (RunDir(root, name).trained_model / "model.safetensors").read_bytes()


def losses(root: Path, name: str) -> list[float]:
    """Of each step, as they stand in the metrics."""
    return [record["optim/loss"] for record in read_metrics(RunDir(root, name).metrics)]
