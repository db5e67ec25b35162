"""The diagnosis of a run: every fault is provoked in a real Redis, and a run in order is not called faulty."""

import io
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from rich.console import Console

from slipstream.common.config.config import Config, RunConfig
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Outcome
from slipstream.replay.fleet.fleet import Fleet, Refusal, RunState
from slipstream.replay.records.ledger import ledger_of
from slipstream.replay.run.diagnosis import FAULT_S, FINDERS, Diagnosis, Facts, diagnose, diagnose_records
from slipstream.replay.run.equal_returns import Outlook, outlook
from slipstream.replay.run.observer import WINDOW_S, Observer, last_error, last_line
from slipstream.tools.run.up import LineReporter
from tests.common.process.test_headline import step
from tests.replay.buffer.every_verb import FACTS, MEMBER
from tests.replay.records.attempts import Views, leased, make_buffer, ticket

Steps = list[dict[str, Any]]


class Scene:
    """A run in order, which a fault then changes: its learner trains, and one actor is alive."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        self.buffer: Views = make_buffer(client, run_id).start()
        self.fleet = Fleet(client, run_id)
        self.fleet.describe_run(FACTS)
        self.fleet.set_run_state(RunState.TRAINING)
        self.fleet.beat(msgspec.structs.replace(MEMBER, policy_version=0))
        self.now = 0.0
        self.config = Config(run=RunConfig(name=run_id), replay=ReplayConfig(max_lag=4))
        self.observer = Observer(client, self.config, clock=lambda: self.now)
        self.steps: Steps = [made_step(number) for number in range(1, 6)]
        self.num_groups = 0

    def play(self, count: int, *, rewards: Sequence[float]) -> None:
        """Play `count` groups of two, whose members earn `rewards`."""
        for _ in range(count):
            self.buffer.earn(self.buffer.begin(ticket(self.num_groups)), *rewards)
            self.num_groups += 1

    def diagnosis(self) -> Diagnosis:
        return diagnose(self.observer.facts(self.steps))


def made_step(number: int, **changes: float) -> dict[str, Any]:
    rest = {"time": time.time(), "perf/step_s": 0.5, "optim/grad_norm": 1.0, "optim/skipped": 0.0}
    return step(number, episodes=64, success=0.5) | rest | changes


Provoke = Callable[[Scene], None]
DEATH = "the engine process ended with exit code -6"


@pytest.fixture
def scene(redis_client: redis.Redis, run_id: str) -> Scene:
    return Scene(redis_client, run_id)


def in_state(state: RunState) -> Provoke:
    return lambda scene: scene.fleet.set_run_state(state)


def with_steps(**changes: float) -> Provoke:
    """Five steps that recorded `changes`."""

    def provoke(scene: Scene) -> None:
        scene.steps = [made_step(number, **changes) for number in range(1, 6)]

    return provoke


def lose_the_actor(scene: Scene) -> None:
    scene.play(20, rewards=(0.0, 0.0))  # whatever else is wrong
    scene.fleet.leave(MEMBER.name)


def break_the_environment(scene: Scene) -> None:
    for group_id in range(4):
        lease = scene.buffer.begin(ticket(group_id))
        for attempt in (0, 1):
            scene.buffer.actor.fail(lease, 0, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="it broke")


def kill_two_engines(scene: Scene) -> None:
    scene.buffer.learner.open([ticket(0)])
    for _ in range(2):
        scene.buffer.actor.release(leased(scene.buffer), death=DEATH)


def offer(version: int) -> Provoke:
    return lambda scene: setattr(scene.observer._bulletin, "highest_version", lambda: version)


def refuse_the_weights(scene: Scene) -> None:
    refusal = Refusal(policy_version=0, reason="version 0 is refused by its probe: of 9 nats", unfit=True)
    scene.fleet.beat(msgspec.structs.replace(MEMBER, policy_version=0, refusal=refusal))
    scene.fleet.leave(MEMBER.name)  # it also explains why no actor is alive


def earn_nothing(scene: Scene, trained: float = 0.0) -> None:
    scene.play(40, rewards=(0.0, 0.0))
    with_steps(**{"trained/reward": trained})(scene)


def earn_nothing_where_a_teacher_teaches(scene: Scene) -> None:
    earn_nothing(scene)
    scene.config.objective.advantage = "distillation"


def earn_by_a_verdict(scene: Scene) -> None:
    earn_nothing(scene)
    scene.buffer.earn(scene.buffer.begin(ticket(40, is_judged=True)), 0.0, 0.0)


def earn_the_same(scene: Scene, reward: float = 0.5) -> None:
    scene.play(20, rewards=(reward, reward))
    groups = scene.buffer.learner.claim(1, 20, policy_version=0, max_lag=0)
    scene.buffer.learner.drop([group.ticket.group_id for group in groups], "zero_variance")


def stand_still(scene: Scene) -> None:
    scene.steps[-1]["time"] -= 61.0


FAULTS: dict[str, tuple[Provoke, str]] = {
    "the learner ended with an error": (in_state(RunState.FAILED), "slipstream up --resume"),
    "actors refuse the weights": (refuse_the_weights, "1 actors refuse version -1; a: version 0 is refused by its"),
    "engines die": (kill_two_engines, f"2 attempts were given up; the last death: {DEATH}; read the log"),
    "no actor is alive": (lose_the_actor, "start `slipstream actors`"),
    "every attempt fails": (break_the_environment, "8 failed and 0 finished; the last one: env_failure: it broke"),
    "actors have old weights": (offer(7), "1 of 1 are more than 6 versions behind; a has 0, the newest is 7"),
    "no episode earns a reward": (earn_nothing, "the returns of the last 80 episodes are 0"),
    "siblings earn the same": (earn_the_same, "20 of 20 groups had nothing to compare"),
    "nothing is learned": (with_steps(**{"optim/grad_norm": 0.0}), "norm of the gradient was 0 in the last 5 steps"),
    "every step is skipped": (with_steps(**{"optim/skipped": 1.0}), "or the guard refused it, in the last 5 steps"),
    "the policy does not follow the action format": (
        with_steps(**{"trained/valid_actions": 0.02}),
        "2% of the actions of the last 5 steps were valid; look at some",
    ),
    "the learner makes no steps": (stand_still, "the last was 61 s ago"),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_named_with_its_evidence(scene: Scene, cause: str) -> None:
    assert not scene.diagnosis().is_fault
    provoke, evidence = FAULTS[cause]
    provoke(scene)
    found = scene.diagnosis()
    assert (found.cause, found.is_fault) == (cause, True)
    assert evidence in str(found)


def test_a_learner_that_failed_is_quoted(scene: Scene, tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    scene.observer = Observer(scene.client, scene.config, log=log)
    scene.fleet.set_run_state(RunState.FAILED)
    assert scene.diagnosis().evidence == "it set the run's state to failed", "no log is here"
    log.write_text("x" * 9000 + "\nslipstream learner: OSError: [Errno 28] No space left on device: 'metrics.jsonl'\n")
    quoted = "No space left on device: 'metrics.jsonl'; mend that, or read its log, then continue"
    assert quoted in str(scene.diagnosis())


def test_an_actor_that_died_in_the_first_evaluation_is_a_fault_with_its_log(scene: Scene, tmp_path: Path) -> None:
    scene.observer = Observer(scene.client, scene.config, log=tmp_path / "learner.log")
    (tmp_path / "actor-0.log").write_text("loading the weights: 3 of 8\n")
    scene.fleet.set_run_state(RunState.STARTING)
    scene.fleet.leave(MEMBER.name)
    found = scene.diagnosis()
    assert (found.cause, found.is_fault) == ("the learner starts", False), "no actor was alive since this one looks"
    assert "the log of an actor: loading the weights: 3 of 8" in found.evidence
    scene.fleet.beat(MEMBER)
    assert scene.diagnosis().cause == "the learner starts"
    scene.fleet.leave(MEMBER.name)
    log = "RuntimeError: no kernel image is available\nEngineDied: the engine process ended with exit code 1\nbye\n"
    (tmp_path / "actor-0.log").write_text(log)
    found = scene.diagnosis()
    assert (found.cause, found.is_fault) == ("no actor is alive", True)
    assert "the log of an actor: RuntimeError: no kernel image is available" in found.evidence


def test_an_environment_that_fails_in_the_first_evaluation_is_a_fault(scene: Scene) -> None:
    scene.fleet.set_run_state(RunState.STARTING)
    scene.buffer = make_buffer(scene.client, scene.run_id, stream="eval").start()
    assert scene.diagnosis().cause == "the learner starts"
    break_the_environment(scene)
    found = scene.diagnosis()
    assert (found.cause, found.is_fault) == ("every attempt fails", True) and "env_failure: it broke" in found.evidence
    scene.fleet.set_run_state(RunState.TRAINING)
    assert not scene.diagnosis().is_fault, "the evaluation is over"


SOLVED = {"trained/success": 1.0, "trained/reward": 1.0}
CRITIC_WARMS_UP = {"optim/skipped": 1.0, "optim/guard_scale": 1.0, "optim/grad_norm": 0.0}


def export_the_model(scene: Scene) -> None:
    scene.config.learner.steps = 5
    stand_still(scene)


def fail_now_and_then(scene: Scene) -> None:
    break_the_environment(scene)
    scene.num_groups = 4
    scene.play(20, rewards=(0.0, 1.0))


def lose_an_engine_once(scene: Scene) -> None:
    scene.buffer.actor.release(scene.buffer.begin(ticket(0)), death=DEATH)


def refuse_older_weights(scene: Scene) -> None:
    refuse_the_weights(scene)
    scene.fleet.beat(msgspec.structs.replace(MEMBER, policy_version=1))
    offer(1)(scene)


def replace_an_actor_that_refuses(scene: Scene) -> None:
    refuse_the_weights(scene)
    scene.fleet.beat(msgspec.structs.replace(MEMBER, name="b", policy_version=0))


def lose_one_of_two_actors(scene: Scene) -> None:
    scene.fleet.beat(msgspec.structs.replace(MEMBER, name="b", policy_version=0))
    scene.fleet.leave("b")


# For each finder, a scene in which the number that it reads is that of its fault, and another one explains it.
WELL: dict[str, tuple[Provoke, str]] = {
    "_refused_weights": (refuse_older_weights, "neither side waits much"),
    "_refused_weights of one that has left": (replace_an_actor_that_refuses, "neither side waits much"),
    "_engines_die": (lose_an_engine_once, "neither side waits much"),
    "_no_actor": (lose_one_of_two_actors, "neither side waits much"),
    "_attempts_fail": (fail_now_and_then, "neither side waits much"),
    "_stale_actors": (offer(6), "neither side waits much"),
    "_invalid_actions": (with_steps(**SOLVED, **{"trained/valid_actions": 0.02}), "neither side waits much"),
    "_no_reward": (lambda scene: scene.play(40, rewards=(-1.0, 1.0)), "neither side waits much"),
    "_no_reward with a teacher": (earn_nothing_where_a_teacher_teaches, "neither side waits much"),
    "_no_reward with a reward model": (partial(earn_nothing, trained=0.5), "neither side waits much"),
    "_no_reward before a verdict": (earn_by_a_verdict, "neither side waits much"),
    "_no_gradient": (with_steps(**SOLVED, **{"optim/grad_norm": 0.0}), "the tasks are solved"),
    "_no_gradient in a critic's warm-up": (with_steps(**CRITIC_WARMS_UP), "neither side waits much"),
    "_equal_siblings": (partial(earn_the_same, reward=1.0), "the tasks are solved"),
    "_no_step": (export_the_model, "the last step is made"),
    "_not_training": (in_state(RunState.FINISHED), "the run has finished"),
}


@pytest.mark.parametrize("finder", WELL)
def test_a_number_that_another_one_explains_is_no_fault(scene: Scene, finder: str) -> None:
    provoke, cause = WELL[finder]
    provoke(scene)
    found = scene.diagnosis()
    assert (found.cause, found.is_fault) == (cause, False), found


def test_every_finder_has_a_case_in_which_all_is_well() -> None:
    assert {name.partition(" ")[0] for name in WELL} == {find.__name__ for find in FINDERS}  # type: ignore[attr-defined]


def test_solved_hopeless_and_stuck_are_told_apart() -> None:
    assert outlook(success=1.0, mean_return=1.0) is outlook(success=0.95, mean_return=0.2) is Outlook.SOLVED
    assert outlook(success=0.0, mean_return=0.0) is outlook(success=0.0, mean_return=-1.0) is Outlook.HOPELESS
    assert outlook(success=0.0, mean_return=0.5) is outlook(success=0.5, mean_return=0.5) is Outlook.STUCK


def test_a_report_of_a_solved_run_names_the_side_that_waits() -> None:
    steps = [made_step(number, **SOLVED, **{"optim/grad_norm": 0.0}) for number in range(1, 6)]
    facts = Facts(config=Config(), state=RunState.TRAINING, ledger=ledger_of({}), steps=steps, now_s=time.time())
    assert diagnose_records(facts).cause == "neither side waits much"


def test_a_run_in_order_has_no_fault(scene: Scene) -> None:
    scene.play(40, rewards=(0.0, 1.0))
    said = "neither side waits much: the learner was busy for 75% of the last 5 steps, with 1 actors; leave it"
    assert str(scene.diagnosis()) == said


def test_without_a_fault_the_side_that_waits_is_named(scene: Scene) -> None:
    for busy, cause, advice in (
        (0.95, "actors wait for the learner", "use more `learner.ranks`, or fewer actors (advised: 3)"),
        (0.2, "the learner waits for actors", "add actors (advised: 3), or raise `actors.max_episodes`"),
    ):
        scene.steps = [step | {"perf/learner_busy": busy, "fleet/advised_actors": 3.0} for step in scene.steps]
        found = scene.diagnosis()
        assert (found.cause, found.next_step, found.is_fault) == (cause, advice, False)


def test_a_run_that_begins_or_has_ended_has_no_fault(scene: Scene, redis_client: redis.Redis) -> None:
    unknown = Observer(redis_client, Config(run=RunConfig(name=f"{scene.run_id}-unknown")))
    assert str(diagnose(unknown.facts([]))).startswith("the run has not started: no learner has described it")
    scene.fleet.set_run_state(RunState.STARTING)
    assert not scene.diagnosis().is_fault
    fresh = Scene(redis_client, f"{scene.run_id}-fresh")
    fresh.steps = []
    assert fresh.diagnosis().cause == "the first step is being collected"
    fresh.fleet.leave(MEMBER.name)
    redis_client.delete(fresh.fleet._records)
    assert (fresh.diagnosis().cause, fresh.diagnosis().is_fault) == ("no actor has joined yet", False)
    scene.fleet.set_run_state(RunState.FINISHED)
    found = scene.diagnosis()
    assert found.cause == "the run has finished" and not found.is_fault
    assert f"slipstream eval run.name={scene.run_id}" in found.next_step


def test_a_fault_of_long_ago_is_forgotten(scene: Scene) -> None:
    break_the_environment(scene)
    assert scene.diagnosis().is_fault, "judged by the whole run at first"
    scene.now = WINDOW_S / 2
    assert not scene.diagnosis().is_fault, "nothing has failed since"


def reporting(scene: Scene, run_dir: RunDir) -> Callable[[int], list[str]]:
    """The lines that a terminal without control codes shows in the seconds that pass."""
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=80, markup=False), run_dir, scene.observer, clock=lambda: scene.now)

    def report(seconds: int) -> list[str]:
        out.truncate(out.seek(0))
        for _ in range(seconds):
            scene.now += 1.0
            reporter.report()
        return out.getvalue().splitlines()

    return report


def test_a_terminal_without_control_codes_reports_a_fault_once_and_its_end(scene: Scene, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, scene.run_id)
    run_dir.create()
    report = reporting(scene, run_dir)
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in scene.steps))
    assert len(report(9)) == len(scene.steps), "one line a step"
    scene.fleet.leave(MEMBER.name)
    assert report(int(FAULT_S)) == [], "it may end by itself"
    (line,) = report(60)
    assert line.startswith("FAULT: no actor is alive: none sends heartbeats")
    scene.fleet.beat(MEMBER)
    assert report(9) == ["no longer: no actor is alive"]


def test_where_the_output_is_no_terminal_a_long_start_reports_how_far_it_is(scene: Scene, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, scene.run_id)
    run_dir.create()
    log = run_dir.log("learner")
    scene.observer = Observer(scene.client, scene.config, log=log)
    scene.fleet.set_run_state(RunState.STARTING)
    report = reporting(scene, run_dir)
    for said, seconds in (("40 of 200, about 80 s more; 0.311", 70), ("80 of 200, about 60 s more; 0.291", 5)):
        log.write_text(f"INFO warm start, steps: {said} nats per token\n")
        assert report(seconds) == [f"the learner starts: INFO warm start, steps: {said} nats per token"], "each once"


LOG = """2026-11-29 07:51:16,001 INFO the model is loaded
2026-11-29 07:51:17,001 ERROR it failed
ValueError: 3 is too many
2026-11-29 07:51:18,001 WARNING it continues
Writing shards:   0%|          | 0/1 [00:00<?, ?it/s]\rWriting shards: 100%|##########| 1/1 [00:00<00:00]
"""


def test_what_a_process_logged_last_is_quoted_without_its_time_and_never_as_a_bar_of_progress(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text(LOG)
    assert last_line(log) == "WARNING it continues"
    assert last_error(log) == "ValueError: 3 is too many"
    log.write_text(LOG.splitlines()[0])
    assert last_line(log) == "the model is loaded"
    assert last_line(tmp_path / "missing.log") == ""
