"""Actors that vanish, leave and join, as real processes against one Redis server."""

import signal
import time
from pathlib import Path

import pytest

from slipstream.common.process.shutdown import EXIT_PREEMPTED, LEAVE_S
from slipstream.common.records.trajectory import Trajectory
from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, Gate, Process, Run, nothing_runs

GROUPS_PER_STEP = 4
DRAIN_S = 1.0
STANDSTILL_S = 2.0  # an episode behind the gate ends within milliseconds


@pytest.mark.timeout(1200)
def test_work_of_actors_that_die_or_leave_is_done_by_others(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    """Of two actors one is killed; a third joins and gets SIGTERM. The learner keeps making steps.

    The gate stops every episode after its first turn while the test inspects. There is no checkpoint before the end, so
    that all groups stay in Redis.
    """
    gate = Gate(tmp_path / "gate")
    settings = [*GUESS, f"env.options={{gate: {gate}, gate_turn: 1, step_s: 0.1}}", "env.step_timeout_s=600"]
    settings += ["replay.lease_ttl_s=6", f"actors.drain_s={DRAIN_S}"]
    settings += ["learner.steps=100000", "learner.checkpoint_every=100000"]
    # So that no group is dropped for its age, and none leaves Redis because its returns are all equal.
    settings += ["replay.max_lag=1000", "objective.advantage=reinforce_pp"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        victim = run.start_actor("victim")  # actors may be there first
        survivor = run.start_actor("survivor")
        learner = run.start_learner()
        run.wait_until(run.is_described, "the learner describes the run")
        gate.close()

        others_finish_what_a_killed_actor_held(run, gate, victim)
        a_newcomer_joins_by_pull_and_produces(run, gate)
        what_an_actor_told_to_leave_has_so_far_is_gone_on_with(run, gate)

        gate.close()
        stands_still_with_leases_of(run, "survivor")
        learner.send(signal.SIGTERM)
        assert learner.wait() == EXIT_PREEMPTED
        an_actor_without_its_engine_gives_everything_back_and_fails(run, survivor)
        ledger = run.ledger()
        assert ledger.balanced and run.audit() == []
        assert ledger.trained == GROUPS_PER_STEP * run.last_step() and ledger.leased == 0
        assert set(ledger.dropped) <= {"zero_variance"}
        run.wait_until(lambda: nothing_runs(run_id), "every process is gone", deadline_s=30)


def others_finish_what_a_killed_actor_held(run: Run, gate: Gate, victim: Process) -> None:
    for name in ("victim", "survivor"):
        run.wait_until(lambda name=name: run.generated_tokens(name) > 0, f"{name} is in mid-episode")
    orphaned = run.held_by("victim")
    assert orphaned, "the victim held no lease when it was killed"
    victim.kill()
    assert run.held_by("victim") == orphaned
    gate.open()
    run.steps_on(3)
    run.wait_until(lambda: not orphaned & run.unfinished(), "others finish what it held")
    # Of a group that has left Redis since, because all its returns were equal, nothing tells any more who made it.
    assert {actor for group_id in orphaned for actor in run.makers(group_id)} <= {"survivor"}
    assert run.ledger().expired_leases >= len(orphaned)
    assert run.ledger().balanced and run.audit() == []
    assert set(run.ledger().dropped) <= {"zero_variance"}


def a_newcomer_joins_by_pull_and_produces(run: Run, gate: Gate) -> None:
    gate.close()
    run.start_actor("newcomer", "actors.transport=pull")
    run.wait_until(lambda: run.generated_tokens("newcomer") > 0, "the newcomer generates")
    newcomer = run.member("newcomer")
    assert newcomer is not None and newcomer.transport == "pull" and newcomer.policy_version > 0
    gate.open()
    run.wait_until(lambda: made_by(run, "newcomer"), "the newcomer's trajectories are claimed by the learner")


def what_an_actor_told_to_leave_has_so_far_is_gone_on_with(run: Run, gate: Gate) -> None:
    leaver = next(process for process in run.processes if process.name == "newcomer")
    gate.close()
    stands_still_with_leases_of(run, "newcomer")
    before, held = run.ledger(), run.held_by("newcomer")
    leaver.send(signal.SIGTERM)
    run.wait_until(lambda: not run.held_by("newcomer"), "it gives its groups back", deadline_s=DRAIN_S + 5)
    assert run.ledger().expired_leases == before.expired_leases
    assert leaver.wait(DRAIN_S + LEAVE_S) == EXIT_PREEMPTED
    assert run.member("newcomer") is None
    partials = {where: partial for where, partial in run.records("partial").items() if partial.actor == "newcomer"}
    assert partials and {group_id for group_id, _ in partials} <= held
    assert {len(partial.turns) for partial in partials.values()} <= {1, 2}
    assert run.ledger().partials_handed_in == before.partials_handed_in + len(partials)

    gate.open()
    whole: dict[tuple[int, int], Trajectory] = {}

    def all_are_continued() -> bool:
        # A group whose returns are all equal leaves Redis soon; so look at each member from when it is stored.
        num_resumed = run.ledger().partials_resumed - before.partials_resumed  # first: what is counted is stored
        whole.update({where: member for where, member in run.records("blob").items() if where in partials})
        return num_resumed == len(partials)

    run.wait_until(all_are_continued, "the survivor continues what the newcomer handed in")
    assert whole
    for where, member in whole.items():
        partial = partials[where]
        assert (member.actor, member.attempt, len(member.turns)) == ("survivor", partial.attempt, 3)
        assert member.tokens.startswith(partial.tokens)
        assert member.behaviour_logprobs.startswith(partial.behaviour_logprobs)
        assert member.turns[: len(partial.turns)] == partial.turns
    assert run.ledger().failed == before.failed
    run.steps_on(3)


def an_actor_without_its_engine_gives_everything_back_and_fails(run: Run, actor: Process) -> None:
    before = run.ledger()
    actor.child("slipstream.actors.engine.serve_engine").kill()
    assert actor.wait() == 1
    after = run.ledger()
    assert before.leased > 0 == after.leased and after.queued == before.queued + before.leased
    assert (after.expired_leases, after.failed) == (before.expired_leases, before.failed)
    assert "the engine process ended with exit code -9" in actor.last_words()


def stands_still_with_leases_of(run: Run, actor: str) -> None:
    """Behind a gate that was just closed, wait until the episodes that were past it are over and others have begun."""
    before: object = None
    since = time.monotonic()

    def stands_still() -> bool:
        nonlocal before, since
        now = (run.ledger().inserted, run.holders())
        if now != before:
            before, since = now, time.monotonic()
        return time.monotonic() - since > STANDSTILL_S and bool(run.held_by(actor))

    run.wait_until(stands_still, f"{actor} is in mid-episode")


def made_by(run: Run, actor: str) -> bool:
    """Whether a group that the learner claimed has a trajectory of `actor`."""
    return any(actor in run.makers(group_id) for group_id in run.claimed_after(0))
