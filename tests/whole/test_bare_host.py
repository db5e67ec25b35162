"""Hosts that share nothing with the learner join by the printed command, are cut off, and are taken away."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.common.transfer.model_folder import SHAPES
from slipstream.tools.lab.loopback_server import Server
from tests.processes import GUESS, MARK, Run
from tests.tools.cli.verbs import slipstream
from tests.whole.bare_host import BareHost
from tests.whole.lossy_line import TUN

pytestmark = pytest.mark.skipif(not os.access(TUN, os.W_OK), reason=f"{TUN} cannot be opened by this user")
IN_FULL = bool(os.environ.get("SLIPSTREAM_SPOT_IN_FULL"))
NUM_HOSTS = 10
CUT_S = 60.0
SETTINGS = [*GUESS, "env.options={step_s: 0.05}", "learner.steps=100000", "learner.checkpoint_every=100000"]
SETTINGS += ["replay.lease_ttl_s=4", "replay.max_attempts=1000", "actors.count=1", "actors.drain_s=2"]


def printed_command(run: Run) -> str:
    """What `slipstream access join` prints on the learner's host."""
    done = slipstream("access", "join", f"run.name={run.name}", f"run.root={run.dir.path.parent}")
    assert done.returncode == 0, done.stderr
    (command,) = done.stdout.splitlines()
    return command


def scripted(command: str, name: str) -> str:
    """The same settings for an actor without a model."""
    return command.replace("slipstream actors", f"python -m tests.actors.scripted_actor {name}")


class Hosts:
    """A run and its hosts, each of which can reach the run's Redis and its publisher, and nothing else."""

    def __init__(self, run: Run, server: Server, root: Path, stack: ExitStack) -> None:
        """`stack` ends the hosts."""
        self.run = run
        self.all: list[BareHost] = []
        self._server, self._root, self._stack = server, root, stack

    def add(self, name: str) -> BareHost:
        variables = {PASSWORD_VARIABLE: self._server.password, MARK: self.run.name}
        hosts, hidden = self._root / "hosts", self._root / "runs"
        host = self._stack.enter_context(BareHost(name, hosts, hidden=hidden, variables=variables, seed=len(self.all)))
        self.all.append(host)
        offer = self.run.bulletin.latest()
        assert offer is not None
        for port in (self._server.port, int(offer.pull_endpoint.rpartition(":")[2])):
            host.link(port)
        return host


@contextmanager
def running(server: Server, run_id: str, root: Path, *settings: str) -> Iterator[Hosts]:
    with Run(run_id, root=root / "runs", server=server, settings=[*SETTINGS, *settings]) as run, ExitStack() as stack:
        run.start_learner()
        run.wait_until(lambda: run.published_version() >= 0, "the first version")
        yield Hosts(run, server, root, stack)


def makes_steps(run: Run, host: BareHost) -> None:
    step, version = run.last_step(), run.published_version()
    run.wait_until(lambda: host.exit_code is not None or run.last_step() >= step + 2, f"steps with {host.name}")
    assert host.exit_code is None, host.said()

    def are_new() -> bool:
        actors = run.fleet.members()
        return bool(actors) and all(actor.policy_version > version for actor in actors)

    run.wait_until(are_new, f"a newer version than {version} on every actor")


def is_cut_off(run: Run, host: BareHost) -> None:
    """Cut the host's links until its leases have expired, then mend them."""
    expired = run.ledger().expired_leases
    run.wait_until(lambda: run.ledger().leased > 0, "it holds a lease")
    host.line.is_cut = True
    run.wait_until(lambda: run.ledger().expired_leases > expired, "its leases expire")
    host.line.is_cut = False


@pytest.mark.timeout(900)
def test_a_host_that_shares_nothing_joins_by_the_printed_command_and_is_replaced(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """The first host runs vLLM, and the one that takes over a script."""
    with running(redis_server, run_id, tmp_path) as hosts:
        run, command = hosts.run, printed_command(hosts.run)
        assert redis_server.password not in command
        first = hosts.add("spot-1")
        first.start(f"ls -A $HOME {run.dir.path.parent}; {command}; code=$?; cat runs/*/logs/actor-0.log; exit $code")
        makes_steps(run, first)
        is_cut_off(run, first)
        makes_steps(run, first)

        second = hosts.add("spot-2")
        second.start(scripted(command, "second"))
        run.wait_until(lambda: run.member("second") is not None, "the second host joins")
        first.preempt()
        assert first.wait(60) == EXIT_PREEMPTED, first.said()
        assert [member.name for member in run.fleet.members()] == ["second"]
        makes_steps(run, second)
        assert run.audit() == [] and run.ledger().balanced

        files = run.fleet.run_facts().model_files
        assert {SHAPES, "config.json", "tokenizer.json"} <= {file.name for file in files}
        assert not any(file.name.endswith(".safetensors") for file in files)  # they come as a version
        num_bytes = sum(file.blob.num_bytes for file in files)
        for host in (first, second):
            assert f"pulled {len(files)} files of the model, {num_bytes / 1e6:.1f} MB" in host.said(), host.said()
        assert "cannot access" in first.said().splitlines()[0]  # the learner's folder
        assert "/tmp/home:" in first.said() and "config.yaml" not in first.said().split("actor spot-1")[0]


@pytest.mark.skipif(not IN_FULL, reason="`make test-spot` runs it: ten hosts need minutes on two cores")
@pytest.mark.timeout(3600)
def test_ten_hosts_over_slow_links_one_is_cut_for_a_minute_and_each_is_replaced(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """Scripted actors of a run that trains adapters, so that each host pulls the base too."""
    settings = ["model.lora.rank=4", "replay.groups_per_step=8", "learner.checkpoint_every=5"]
    with running(redis_server, run_id, tmp_path, *settings) as hosts:
        run, command = hosts.run, printed_command(hosts.run)
        playing: list[BareHost] = []

        def start(number: int) -> None:
            host = hosts.add(f"spot-{number}")
            host.start(scripted(command, host.name))
            playing.append(host)

        def serving() -> set[str]:
            return {member.name for member in run.fleet.members()}

        for number in range(NUM_HOSTS):
            start(number)
        run.wait_until(lambda: len(serving()) == NUM_HOSTS, "ten hosts play", deadline_s=900)
        makes_steps(run, playing[0])
        playing[0].line.is_cut = True
        cut_at, step = time.monotonic(), run.last_step()
        run.wait_until(lambda: "spot-0" not in serving(), "the cut host is missed")
        run.wait_until(lambda: time.monotonic() - cut_at > CUT_S, "a minute")
        assert run.last_step() > step  # the learner did not wait
        playing[0].line.is_cut = False
        run.wait_until(lambda: "spot-0" in serving(), "it is back")
        for number in range(NUM_HOSTS):
            leaving = playing.pop(0)
            leaving.preempt()
            assert leaving.wait(120) == EXIT_PREEMPTED, leaving.said()
            start(NUM_HOSTS + number)
        run.wait_until(lambda: len(serving()) == NUM_HOSTS, "ten others play", deadline_s=900)
        makes_steps(run, playing[0])
        assert run.audit() == [] and run.ledger().balanced
        report(run)


def report(run: Run) -> None:
    newest, files = run.step_records()[-1], run.fleet.run_facts().model_files
    total = sum(file.blob.num_bytes for file in files)
    print(
        f"\n{2 * NUM_HOSTS} hosts; {len(files)} files of the model, {total / 1e6:.2f} MB for each host; "
        f"{run.published_version() + 1} versions, {newest['perf/publish_mb']:.3f} MB the newest, for a host with "
        f"the one before; {newest['fleet/pulled_bytes'] / 1e6:.1f} MB pulled in all; step {run.last_step()}; "
        f"{run.ledger()}"
    )
