"""The stage between complete and ready: a judge process marks whole groups, and may be slow, wrong, away or killed."""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from slipstream.actors.host.judging import JudgeSetup, keep_judging
from slipstream.common.config.config import dump_config, load_config
from slipstream.envhub.rewards.episode import Reading
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import group_parts, parts_of
from slipstream.envhub.rewards.sibling_judge import Shown, sibling_marks
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.ticket import Group, Marks, Verdict, with_verdict
from tests.actors.group.test_group import Actor
from tests.actors.group.test_reward_stage import scorer
from tests.actors.scripted_judge import Reply, ScriptedJudge, completion, impatient
from tests.envhub.rewards.test_group_judge import RUBRIC, marks_of_digits, replies_of
from tests.processes import Process
from tests.replay.buffer.every_verb import FACTS
from tests.replay.records.attempts import Views, ids, leased, ticket, verdict_on
from tests.waiting import until

__all__ = ["impatient"]  # a fixture
MEMBERS = 3
DEADLINE_S = 90.0


def better(url: str, **settings: Any) -> dict[str, Any]:
    judge = {"part": "judge", "url": url, "model": "m", "rubric": RUBRIC, "compare": "listwise", "weight": 0.5}
    return {"better": {**judge, "deadline_s": DEADLINE_S, **settings}}


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    with ScriptedJudge(marks_of_digits) as judge:
        yield judge


def setup_of(buffer: Views, rewards: dict[str, Any], name: str = "j") -> JudgeSetup:
    parts = {"shop": group_parts(parts_of("env.rewards", rewards))}
    return JudgeSetup(name=name, buffer=buffer.judge, parts=parts, retry_s=0.0)


def judged_by(setup: JudgeSetup, is_done: Callable[[], bool]) -> None:
    asyncio.run(asyncio.wait_for(keep_judging(setup, is_done=is_done), DEADLINE_S))


def complete(buffer: Views, *group_ids: int, columns: Mapping[int, dict[str, Any]] = {}) -> None:
    """Store groups whose members say 0, 1, 2 ..., after a word of their group, for a judge."""
    buffer.learner.open([ticket(group_id, num_members=MEMBERS, is_judged=True) for group_id in group_ids])
    for group_id in group_ids:
        lease = leased(buffer)
        for member in lease.missing:
            said = {"user": f"group {group_id}", "assistant": str(member)}
            conversation = [{"role": role, "content": text} for role, text in said.items()]
            shown = json.dumps({"conversation": conversation, "columns": columns.get(group_id, {})})
            buffer.actor.insert(lease, msgspec.structs.replace(buffer.attempt(lease, member), shown=shown))


def claimed(buffer: Views, num_groups: int) -> list[Group]:
    return buffer.learner.claim(1, num_groups, policy_version=0, max_lag=0)


def test_a_judged_group_is_ready_and_its_marks_survive_an_old_checkpoint(buffer: Views, server: ScriptedJudge) -> None:
    complete(buffer, 0, 1)
    assert (buffer.ledger.judging, buffer.ledger.ready, claimed(buffer, 1)) == (2, 0, [])
    judged_by(setup_of(buffer, better(server.url)), lambda: buffer.ledger.ready == 2)
    assert buffer.audit() == []
    before = claimed(buffer, 2)
    for group in before:
        members = group.trajectories
        assert [member.part_values for member in members] == [{"better": 0.1 * place} for place in range(MEMBERS)]
        expected = [{"task": 1.0, "better": 0.05 * place} for place in range(MEMBERS)]
        assert [member.turns[-1].rewards for member in members] == expected
        assert {member.shown for member in members} == {""}, "an archive does not need it"
    buffer.learner.acquire_epoch()
    assert buffer.learner.reopen(0) == 2
    after = claimed(buffer, 2)
    assert len(after) == len(server.requests) == 2 and all(group in before for group in after)
    buffer.learner.settle(1)
    assert buffer.audit() == [] and buffer.ledger.trained == 2


async def test_a_slow_judge_stops_no_rollout(buffer: Views, run_id: str, server: ScriptedJudge) -> None:
    """Actors end their groups, without a lease or a place in the engine, while not one answer has come."""
    may_answer = threading.Event()

    def slow(request: dict[str, Any], number: int) -> Reply:
        may_answer.wait(DEADLINE_S)
        return completion(json.dumps({at: {"clear": len(reply)} for at, reply in replies_of(request).items()}))

    server.answer_by(slow)
    buffer.learner.open([ticket(group_id, num_members=2, is_judged=True) for group_id in range(4)])
    rewards = better(server.url, rubric=RUBRIC | {"scale": [0, 1000]})
    actor: Actor = scorer("actor", run_id, rewards)
    given = (setup_of(buffer, rewards), lambda: buffer.ledger.ready == 4)
    judging = threading.Thread(target=judged_by, args=given, daemon=True)
    judging.start()
    for _ in range(4):
        await actor.play(buffer)
    await until(lambda: len(server.requests) > 0)
    ledger = buffer.ledger
    assert (ledger.judging, ledger.leased, ledger.queued, ledger.ready) == (4, 0, 0, 0)
    assert actor.setup.episodes.num_running == 0
    may_answer.set()
    judging.join(DEADLINE_S)
    ledger = buffer.ledger
    assert (ledger.ready, ledger.expired_judgings, ledger.failed) == (4, 0, {}) and buffer.audit() == []
    for group in claimed(buffer, 4):
        assert all(0 < member.part_values["better"] <= 1 for member in group.trajectories)


def test_garbage_of_a_judge_drops_the_group_without_zeros(buffer: Views, server: ScriptedJudge) -> None:
    server.answer_by(lambda request, number: completion("They are all great."))
    complete(buffer, 0)
    judged_by(setup_of(buffer, better(server.url)), lambda: buffer.ledger.dropped == {"judge_failed": 1})
    ledger = buffer.ledger
    assert (ledger.failed, ledger.ready, ledger.judging) == ({"judge_failed": 3}, 0, 0)
    assert ledger.balanced and buffer.audit() == []
    (failure, *_) = buffer.learner.failures()
    assert "`env.rewards.better`" in failure.reason and "3 answers were malformed" in failure.reason


def is_settled(buffer: Views) -> bool:
    ledger = buffer.ledger
    return (ledger.ready, ledger.dropped) == (2, {"judge_failed": 1})


def test_a_group_without_its_columns_is_dropped_and_the_others_are_judged(buffer: Views, server: ScriptedJudge) -> None:
    complete(buffer, 0, 1, 2, columns={1: {"gold": 4}, 2: {"gold": 5}})
    judged_by(setup_of(buffer, better(server.url, columns=["gold"])), lambda: is_settled(buffer))
    assert buffer.audit() == []
    assert "`env.rewards.better`: the actor stored no column gold" in buffer.learner.failures()[0].reason


def test_a_group_that_ends_its_judge_each_time_is_dropped_and_the_others_are_judged(
    buffer: Views, server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compared(judge: Judge, members: Sequence[Shown]) -> list[Reading[float]]:
        if members[0].conversation[0]["content"] == "group 0":
            raise ZeroDivisionError
        return await sibling_marks(judge, members)

    monkeypatch.setattr("slipstream.actors.host.judging.sibling_marks", compared)
    complete(buffer, 0, 1, 2)
    for _ in range(20):  # as its supervisor starts it again
        with contextlib.suppress(ZeroDivisionError):
            judged_by(setup_of(buffer, better(server.url)), lambda: is_settled(buffer))
            break
    assert is_settled(buffer) and buffer.audit() == []


def test_a_judge_that_is_away_judges_the_group_later(buffer: Views, server: ScriptedJudge) -> None:
    server.answer_by(lambda request, number: (401, {}, b"no") if number < 2 else marks_of_digits(request, number))
    complete(buffer, 0)
    judged_by(setup_of(buffer, better(server.url)), lambda: buffer.ledger.ready == 1)
    assert buffer.ledger.failed == {"judge_failed": 2} and buffer.audit() == []


def test_a_lost_group_is_judged_again_and_the_late_verdict_is_refused(buffer: Views, server: ScriptedJudge) -> None:
    complete(buffer, 0)
    late = buffer.judge.lease("late")
    assert late is not None and buffer.judge.lease("other") is None
    buffer.client.zadd(f"{buffer.base}:judging", {"0": 1})
    judged_by(setup_of(buffer, better(server.url)), lambda: buffer.ledger.ready == 1)
    assert buffer.judge.store(late, verdict_on(late)).value == "fenced"
    ledger = buffer.ledger
    assert (ledger.expired_judgings, ledger.fenced_verdicts, ledger.finished) == (1, 1, 1)
    assert [member.part_values["better"] for member in claimed(buffer, 1)[0].trajectories] == [0.0, 0.1, 0.2]


def test_a_judge_that_leaves_gives_its_groups_back(buffer: Views, server: ScriptedJudge) -> None:
    server.answer_by(lambda request, number: time.sleep(1) or marks_of_digits(request, number))
    complete(buffer, 0, 1)
    judged_by(setup_of(buffer, better(server.url)), lambda: len(server.requests) == 2)
    heir = buffer.judge.lease("heir")
    assert heir is not None and (heir.ticket.group_id, heir.num_judgings) == (0, 0)


def test_a_learner_quarantines_an_unreadable_payload_with_its_sender(buffer: Views, server: ScriptedJudge) -> None:
    complete(buffer, 0, 1)
    (name,) = buffer.names("blob:0:1")
    buffer.client.set(name, b"garbage")
    judged_by(setup_of(buffer, better(server.url)), lambda: buffer.ledger.ready == 2)
    assert ids(claimed(buffer, 2)) == [1]
    (poison,) = buffer.quarantined()
    assert (poison.group_id, poison.member, poison.actor) == (0, 1, "a")


@pytest.mark.parametrize(
    ("marks", "complaint"),
    [
        ([], "has marks for 0 of 2 members"),
        ([Marks(values={}, rewards={"task": 1.0})] * 2, "has task, which the trajectory has already"),
        ([Marks(values={}, rewards={"x": float("nan")})] * 2, "not finite, or beyond"),
        ([Marks(values={"x": 1e13}, rewards={})] * 2, "not finite, or beyond"),
        ([Marks(values={}, rewards={f"x{number}": 0.0 for number in range(64)})] * 2, "the limit is 64"),
    ],
)
def test_a_wrong_verdict_quarantines_the_group(buffer: Views, marks: list[Marks], complaint: str) -> None:
    buffer.insert(buffer.begin(ticket(0, is_judged=True)))
    judging = buffer.judge.lease("j")
    buffer.judge.store(judging, Verdict(judge="j", members=marks))
    assert claimed(buffer, 1) == []
    (poison,) = buffer.quarantined()
    assert complaint in poison.reason and buffer.audit() == []
    assert with_verdict(judging.trajectories, verdict_on(judging))[0].part_values == {"liked": 0.5}


class Run:
    def __init__(self, client: redis.Redis, redis_url: str, run_id: str, folder: Path, url: str) -> None:
        self.fleet, self._folder, self._name = Fleet(client, run_id), folder, f"run.name={run_id}"
        self.describe(better(url))
        self.fleet.set_run_state(RunState.TRAINING)
        command = [sys.executable, "-m", "slipstream.tools.cli.cli", "serve", "judge"]
        self._command = [*command, self._name, f"redis.url={redis_url}"]

    def describe(self, rewards: dict[str, Any]) -> None:
        config = load_config(None, [self._name, "env.name=shop"])
        config.env.rewards = rewards
        self.fleet.describe_run(msgspec.structs.replace(FACTS, config_yaml=dump_config(config)))

    def judge(self, name: str) -> Process:
        return Process(name, self._command, log=self._folder / f"{name}.log", environment={})


def wait_until(holds: Callable[[], bool], what: str, process: Process) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline and not process.failed, f"waited for: {what}\n{process.last_words()}"
        time.sleep(0.05)


def test_a_judge_process_that_is_killed_in_the_middle_loses_nothing_and_each_group_is_judged_once(
    buffer: Views, redis_url: str, run_id: str, tmp_path: Path, server: ScriptedJudge
) -> None:
    num_groups, is_killed = 6, threading.Event()

    def slow_at_first(request: dict[str, Any], number: int) -> Reply:
        if number >= 2:
            is_killed.wait(DEADLINE_S)
        return marks_of_digits(request, number)

    server.answer_by(slow_at_first)
    complete(buffer, *range(num_groups))
    run = Run(buffer.client, redis_url, run_id, tmp_path, server.url)
    first = run.judge("first")
    wait_until(lambda: len(server.requests) == num_groups, "all groups are asked about", first)
    wait_until(lambda: buffer.ledger.ready == 2, "two groups are ready", first)
    first.kill()
    is_killed.set()
    ledger = buffer.ledger
    assert (ledger.judging, ledger.ready) == (num_groups - 2, 2) and buffer.audit() == []
    name = f"{buffer.base}:judging"
    buffer.client.zadd(name, dict.fromkeys(buffer.client.zrange(name, 0, -1), 1))  # its leases expire
    second = run.judge("second")
    wait_until(lambda: buffer.ledger.ready == num_groups, "all groups are ready", second)
    run.fleet.set_run_state(RunState.FINISHED)
    assert second.wait() == 0
    ledger = buffer.ledger
    assert (ledger.finished, ledger.expired_judgings, ledger.fenced_verdicts) == (num_groups, num_groups - 2, 0)
    assert ledger.balanced and buffer.audit() == []
    assert len(server.requests) == num_groups + num_groups - 2, "what was judged is not asked again"
    for group in claimed(buffer, num_groups):
        assert [member.part_values["better"] for member in group.trajectories] == [0.0, 0.1, 0.2]


def test_a_judge_names_what_is_missing(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> None:
    run = Run(redis_client, redis_url, run_id, tmp_path, "http://127.0.0.1:1/v1")
    for name, rewards, complaint in (
        ("idle", {}, "has no judge of whole groups"),
        ("keyless", better("http://127.0.0.1:1/v1", key_env="NO_SUCH_KEY"), "`env.rewards.better`: key_env names"),
        ("useless", better("actors", model=""), "judge its groups, as the run's own policy is one of the judges"),
    ):
        run.describe(rewards)
        judge = run.judge(name)
        assert judge.wait() == 2 and complaint in judge.said()


def test_groups_from_before_a_resume_without_the_judge_become_ready_without_marks(
    buffer: Views, redis_url: str, run_id: str, tmp_path: Path, server: ScriptedJudge
) -> None:
    complete(buffer, 0)
    run = Run(buffer.client, redis_url, run_id, tmp_path, server.url)
    run.describe({})
    judge = run.judge("judge")
    wait_until(lambda: buffer.ledger.ready == 1, "the group is ready", judge)
    run.fleet.set_run_state(RunState.FINISHED)
    assert judge.wait() == 0
    assert [member.part_values for member in claimed(buffer, 1)[0].trajectories] == [{}] * MEMBERS
    assert (buffer.ledger.expired_judgings, server.requests) == (0, [])
