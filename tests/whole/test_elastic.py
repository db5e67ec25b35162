"""A fleet that grows and shrinks in the middle of a run: actors join, are killed, get their notice and are cut off."""

import os
import signal
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest

from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.lab.loopback_server import Server
from tests.actors.host.metadata_service import MetadataService
from tests.link import Link
from tests.processes import GUESS, Process, Run, nothing_runs

IN_FULL = os.environ.get("SLIPSTREAM_FLEET_IN_FULL") == "1"  # `make test-fleet`: 1 -> 6 -> 1, and undisturbed runs
NUM_KILLS, NUM_NOTICES = (3, 2) if IN_FULL else (1, 1)
NUM_UNDISTURBED = 3 if IN_FULL else 0
NUM_STEPS = 150 if IN_FULL else 40  # at least
DEADLINE_S = 600.0
LEASE_TTL_S = 6.0
GROUPS_PER_STEP = 4
REDO_S = 60.0  # in which a group that is free again is finished by another actor, on a machine that does much else
END = 20  # the steps that tell what a run has come to
SETTINGS = [*GUESS, "env.options={step_s: 0.2}", "learner.checkpoint_every=20", "actors.drain_s=1"]
SETTINGS += ["replay.max_lag=16", f"replay.lease_ttl_s={LEASE_TTL_S}"]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_run_goes_through_joins_kills_notices_and_a_partition_and_nothing_is_lost(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """One actor, then many, then that one again: it stands behind a link that is cut meanwhile."""
    with (
        Link(redis_server.port) as link,
        Run(run_id, root=tmp_path, server=redis_server, settings=[*SETTINGS, "learner.steps=100000"]) as run,
    ):
        learner = run.start_learner()
        behind_a_link = (f"redis.url=redis://127.0.0.1:{link.port}/0", "actors.transport=pull")
        survivor = run.start_actor("survivor", *behind_a_link)
        run.steps_on(4, deadline_s=DEADLINE_S)
        assert [member.name for member in run.fleet.members()] == ["survivor"]
        with ExitStack() as clouds:
            victims = [run.start_actor(f"victim-{index}") for index in range(NUM_KILLS)]
            hosts = [a_host(run, clouds.enter_context(MetadataService())) for _ in range(NUM_NOTICES)]
            run.wait_until(
                lambda: (
                    sum(member.generated_tokens > 0 for member in run.fleet.members()) == 1 + NUM_KILLS + NUM_NOTICES
                ),
                "all have joined and generate",
                deadline_s=DEADLINE_S,
            )
            engines = [member.engine for member in run.fleet.members()]
            assert all(engine.startswith("vllm ") and engine.endswith(" cpu") for engine in engines)
            cut_off_for_longer_than_its_leases(run, link)
            for victim in victims:
                killed_with_groups_in_its_hands(run, victim)
            for host, cloud in hosts:
                told_that_its_host_goes(run, host, cloud)
        run.wait_until(lambda: [member.name for member in run.fleet.members()] == ["survivor"], "it is alone again")
        run.steps_on(max(END, NUM_STEPS - run.last_step()), deadline_s=DEADLINE_S)
        ends_with_all_accounted_for(run, learner, survivor)
        longest_s = max(record["time/wait_s"] for record in run.step_records()[1:])
        assert longest_s < LEASE_TTL_S + REDO_S
        report(run, link, longest_s)
        disturbed = [record["trained/reward"] for record in run.step_records()]
    assert statistics.mean(disturbed[-END:]) > 1.2 * statistics.mean(disturbed[:4])
    assert nothing_runs(run_id)
    if NUM_UNDISTURBED:
        comes_to_what_undisturbed_runs_come_to(redis_server, run_id, tmp_path, disturbed)


def a_host(run: Run, cloud: MetadataService) -> tuple[Process, MetadataService]:
    cloud.wants_tokens()
    return run.start_host("actors.count=1", f"actors.notices=aws@{cloud.url}"), cloud


def cut_off_for_longer_than_its_leases(run: Run, link: Link) -> None:
    run.wait_until(lambda: bool(run.held_by("survivor")), "it holds leases when it is cut off")
    expired, generated = run.ledger().expired_leases, run.generated_tokens("survivor")
    link.is_cut = True
    run.wait_until(lambda: run.ledger().expired_leases > expired and link.num_held > 0, "its leases expire")
    run.steps_on(2, deadline_s=DEADLINE_S)
    link.is_cut = False
    run.wait_until(lambda: run.generated_tokens("survivor") > generated, "it continues after the partition")


def killed_with_groups_in_its_hands(run: Run, victim: Process) -> None:
    run.wait_until(lambda: bool(run.held_by(victim.name)), "the victim holds leases")
    victim.send(signal.SIGSTOP)  # SIGSTOP: what it holds is what it is killed with
    orphaned = run.held_by(victim.name)
    victim.kill()
    assert orphaned
    run.wait_until(lambda: not orphaned & run.unfinished(), "others finish what it held")
    run.steps_on(2, deadline_s=DEADLINE_S)


def told_that_its_host_goes(run: Run, host: Process, cloud: MetadataService) -> None:
    expired, names = run.ledger().expired_leases, {member.name for member in run.fleet.members()}
    host.expect_end()
    notice = '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'
    cloud.answers["/latest/meta-data/spot/instance-action"] = (200, notice)
    assert host.wait() == EXIT_PREEMPTED
    assert "AWS will terminate this host at 2026-11-21T08:22:00Z" in host.said()
    assert run.ledger().expired_leases == expired, "it gave its groups back itself"
    gone = names - {member.name for member in run.fleet.members()}
    assert gone
    run.wait_until(lambda: not gone & set(run.bulletin.broadcast_members()), "it is in no broadcast any more")
    run.steps_on(2, deadline_s=DEADLINE_S)


def ends_with_all_accounted_for(run: Run, learner: Process, survivor: Process) -> None:
    for process in (survivor, learner):
        process.send(signal.SIGTERM)
        assert process.wait() == EXIT_PREEMPTED
    ledger = run.ledger()
    assert ledger.balanced and run.audit() == []
    assert ledger.leased == 0 and set(ledger.dropped) <= {"zero_variance", "too_old"}
    assert ledger.trained + ledger.claimed >= GROUPS_PER_STEP * run.last_step()
    assert ledger.expired_leases >= 1 + NUM_KILLS
    assert run.steps() == list(range(1, run.last_step() + 1))


def comes_to_what_undisturbed_runs_come_to(server: Server, run_id: str, root: Path, disturbed: list[float]) -> None:
    """Within four standard errors of the difference between one run and the mean of others of the same seed.

    Another seed is another model to begin with, of which some take far longer to find out what is asked.
    """
    ends = []
    for number in range(NUM_UNDISTURBED):
        settings = [*SETTINGS, f"learner.steps={len(disturbed)}"]
        with Run(f"{run_id}-{number}", root=root, server=server, settings=settings) as run:
            learner = run.start_learner()
            run.start_actor("alone")
            run.wait_until(lambda learner=learner: learner.exit_code == 0, "it ends", deadline_s=2 * DEADLINE_S)
            ends.append(statistics.mean(record["trained/reward"] for record in run.step_records()[-END:]))
    end = statistics.mean(disturbed[-END:])
    noise = statistics.stdev(ends) * (1 + 1 / len(ends)) ** 0.5
    print(f"reward of the last {END} of {len(disturbed)} steps: {end:.3f}; undisturbed: {ends}")
    assert abs(end - statistics.mean(ends)) < 4 * noise


def report(run: Run, link: Link, longest_s: float) -> None:
    print(f"{run.last_step()} steps; longest wait {longest_s:.1f} s; {link.num_held} messages held up; {run.ledger()}")
