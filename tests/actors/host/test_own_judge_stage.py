"""Groups that the run's own policy judges: actors do it beside their episodes, and may be slow, old, leave or die."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from slipstream.actors.engine.engine import Completion, EngineDied
from slipstream.actors.host.own_judge import OwnJudge
from slipstream.common.config.config import dump_config, load_config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.shutdown import EXIT_PREEMPTED, Shutdown
from slipstream.common.records.trajectory import Sampling, Task, Trajectory
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root
from slipstream.envhub.rewards.part import book_on, judge_by
from slipstream.learner.supply.supply import Supply
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.fleet.judge_account import JudgeAccount
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.actors.episode.episodes import ids
from tests.actors.group.test_group import MEMBERS, TOKENIZER, TURNS, Actor, acting
from tests.actors.group.test_reward_stage import scoring
from tests.actors.host.test_judge_stage import wait_until
from tests.actors.scripted_judge import impatient
from tests.envhub.rewards.test_group_judge import RUBRIC
from tests.guess import WORDS
from tests.learner.supply.test_supply import ahead_of
from tests.processes import Process
from tests.replay.buffer.every_verb import FACTS
from tests.replay.records.attempts import make_buffer, ticket
from tests.waiting import until

__all__ = ["impatient"]  # a fixture
MAX_TOKENS = 8192
ENDLESS = RUBRIC | {"text": "You compare." * 1000}
BETTER = {"part": "judge", "url": "actors", "compare": "listwise", "rubric": RUBRIC, "weight": 0.5}


def by_last_word(request: dict[str, Any]) -> str:
    """Marks each attempt by the place of its last word among WORDS."""
    episodes = request["episodes"].items()
    said = {number: [each["content"] for each in turns if each["role"] == "assistant"] for number, turns in episodes}
    return json.dumps({number: {"clear": WORDS.index(words[-1])} for number, words in said.items()})


class Policy(ScriptedEngine):
    """Plays with random words, and judges by `judge`; while `may_judge` is clear it begins no verdict."""

    def __init__(self, judge: Callable[[dict[str, Any]], str] = by_last_word, *, waits: bool = False) -> None:
        super().__init__(self._write, policy_version=0, schedule=Schedule(token_time_s=0.0001), max_tokens=MAX_TOKENS)
        self.may_judge = asyncio.Event()
        if not waits:
            self.may_judge.set()
        self.num_judging = 0  # requests for a verdict so far
        self.dies = False
        self._judge = judge
        self._player = Actor("player", "run")

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        if "You compare." in TOKENIZER.decode(tokens):
            self.num_judging += 1
            await self.may_judge.wait()
            if self.dies:
                raise EngineDied("gone")
        return await super().generate(tokens, sampling, seed=seed)

    async def gets(self, version: int) -> None:
        """Serve other weights from now on."""
        self._staged_version = version
        await self.commit(version)

    def _write(self, tokens: list[int], seed: int | None) -> list[int]:
        prompt = str(TOKENIZER.decode(tokens))
        if "You compare." not in prompt:
            return self._player._word(tokens, seed)
        request = json.loads(prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0])
        return [*ids(TOKENIZER, self._judge(request)), TOKENIZER.eos_token_id]


class Scene:
    def __init__(self, client: redis.Redis, run_id: str, *, max_attempts: int = 3, **settings: Any) -> None:
        self.buffer = make_buffer(client, run_id, max_attempts=max_attempts)
        self.evaluations = make_buffer(client, run_id, stream="eval")
        self.evaluations.learner.adopt_epoch(self.buffer.learner.acquire_epoch())
        self.rewards = {"better": {**BETTER, **settings}}
        self.actor = Actor("actor", run_id, turns=TURNS)

    def opens(self, *group_ids: int) -> None:
        self.buffer.learner.open([ticket(group_id, num_members=MEMBERS, is_judged=True) for group_id in group_ids])

    @asynccontextmanager
    async def playing(self, policy: Policy, shutdown: Shutdown, *, exit_code: int = 0) -> AsyncIterator[None]:
        """An actor plays, with room for one group, until the run is over behind this."""
        parts = scoring(self.actor, self.rewards)
        setup = self.actor.setup = dataclasses.replace(self.actor.setup, engine=policy, scoring=parts)
        model = ModelConfig(max_tokens=MAX_TOKENS)
        own = OwnJudge(sampler=policy, tokenizer=TOKENIZER, model=model, episodes=setup.episodes)
        judge_by(own, parts.parts)
        book_on(JudgeAccount(self.buffer.client, self.buffer.run_id).add, parts.parts.values())
        buffers, judge_buffer = {"eval": self.evaluations.actor, "train": self.buffer.actor}, self.buffer.judge
        task = acting(self.actor, self.buffer, shutdown, buffers=buffers, judge_buffer=judge_buffer)
        self.acting = asyncio.create_task(task)
        yield
        Fleet(self.buffer.client, self.buffer.run_id).set_run_state(RunState.FINISHED)
        assert await self.acting == exit_code

    def claimed(self, num_groups: int) -> list[list[Trajectory]]:
        return [group.trajectories for group in self.buffer.learner.claim(1, num_groups, policy_version=1, max_lag=1)]


@pytest.fixture
def scene(redis_client: redis.Redis, run_id: str) -> Scene:
    return Scene(redis_client, run_id)


def check_marks(members: list[Trajectory], *, version: int = 0) -> None:
    for member in members:
        last = member.turns[-1]
        word = str(TOKENIZER.decode(member.token_array()[last.start : last.stop - 1].tolist()))
        mark = WORDS.index(word) / 10
        assert member.part_values == {"better": pytest.approx(mark), "better_policy_version": version}
        assert last.rewards["better"] == pytest.approx(mark / 2)


async def test_an_actor_judges_its_runs_groups_and_a_slow_verdict_stops_none(scene: Scene, shutdown: Shutdown) -> None:
    """It plays all groups, in its only two places, before it begins a verdict."""
    policy, num_groups = Policy(waits=True), 5
    scene.opens(*range(num_groups))
    async with scene.playing(policy, shutdown):
        await until(lambda: policy.num_judging == num_groups)
        ledger = scene.buffer.ledger
        assert (ledger.judging, ledger.leased, ledger.queued, ledger.ready) == (num_groups, 0, 0, 0)
        assert scene.actor.setup.episodes.num_running == 0
        policy.may_judge.set()
        await until(lambda: scene.buffer.ledger.ready == num_groups)
    ledger = scene.buffer.ledger
    assert (ledger.expired_judgings, ledger.fenced_verdicts, ledger.failed) == (0, 0, {})
    for members in scene.claimed(num_groups):
        check_marks(members)
        assert {len(member.turns) for member in members} == {TURNS}, "no token of a verdict is trained"
    assert scene.actor.setup.episodes.kept_tokens == policy.load().generated_tokens, "no verdict counts as waste"
    assert policy.num_judging == num_groups and scene.buffer.audit() == []


async def test_an_engine_that_dies_while_it_judges_has_judged_in_vain(scene: Scene, shutdown: Shutdown) -> None:
    """Else a group whose judging kills the engine would kill every engine, again and again."""
    policy = Policy(waits=True)
    policy.dies = True
    scene.opens(0, 1)
    with pytest.raises(EngineDied):
        async with scene.playing(policy, shutdown):
            await until(lambda: policy.num_judging == 2)
            policy.may_judge.set()
            await until(lambda: scene.acting.done())
    ledger = scene.buffer.ledger
    assert (ledger.judging, ledger.failed, ledger.expired_judgings) == (2, {"judge_failed": 2}, 0)
    assert scene.buffer.learner.failures()[0].reason == "gone"
    heir = scene.buffer.judge.lease("heir")
    assert heir is not None and heir.num_judgings == 1


async def test_an_actor_that_must_leave_gives_back_what_it_judges_at_once(scene: Scene, shutdown: Shutdown) -> None:
    policy = Policy(waits=True)
    scene.opens(0, 1)
    async with scene.playing(policy, shutdown, exit_code=EXIT_PREEMPTED):
        await until(lambda: policy.num_judging == 2)
        shutdown.notice()
        await until(lambda: scene.acting.done())
    ledger = scene.buffer.ledger
    assert (ledger.judging, ledger.failed, ledger.expired_judgings) == (2, {}, 0)
    heirs = [scene.buffer.judge.lease("heir") for _ in range(2)]
    assert [heir.num_judgings for heir in heirs if heir is not None] == [0] * 2
    assert scene.buffer.audit() == []


async def test_weights_that_change_before_the_verdict_are_the_judge_s(scene: Scene, shutdown: Shutdown) -> None:
    policy = Policy(waits=True)
    scene.opens(0)
    async with scene.playing(policy, shutdown):
        await until(lambda: policy.num_judging == 1)
        await policy.gets(1)
        policy.may_judge.set()
        await until(lambda: scene.buffer.ledger.ready == 1)
    check_marks(scene.claimed(1)[0], version=1)


async def test_an_old_policy_does_not_judge(scene: Scene, redis_client: redis.Redis, shutdown: Shutdown) -> None:
    """In a synchronous run each group is judged by the very weights that played it."""
    lease = scene.buffer.begin(ticket(0, num_members=MEMBERS, is_judged=True, min_policy_version=1))
    for member in lease.missing:
        conversation = [{"role": "user", "content": "say"}, {"role": "assistant", "content": WORDS[member]}]
        shown = json.dumps({"conversation": conversation, "columns": {}})
        played = scene.buffer.attempt(lease, member, policy_version=1)
        scene.buffer.actor.insert(lease, msgspec.structs.replace(played, shown=shown))
    policy, counters, group = Policy(), f"{scene.buffer.base}:counters", f"{scene.buffer.base}:group:0"
    async with scene.playing(policy, shutdown):
        await until(lambda: int(redis_client.hget(counters, "last_fence") or 0) > lease.fence)  # it has seen the group
        await until(lambda: b"judge" not in redis_client.hkeys(group))
        assert policy.num_judging == 0
        await policy.gets(1)
        await until(lambda: scene.buffer.ledger.ready == 1)
    (members,) = scene.claimed(1)
    expected = [{"better": 0.1 * place, "better_policy_version": 1} for place in range(MEMBERS)]
    assert [member.part_values for member in members] == expected
    assert scene.buffer.ledger.failed == {}


async def test_a_synchronous_run_goes_to_its_end_beside_an_evaluation(scene: Scene, shutdown: Shutdown) -> None:
    """The learner waits for the verdicts of each step, also of the last; held-out episodes are not judged."""
    sizes = ["replay.group_size=2", "replay.groups_per_step=2", "replay.target_lag=0", "learner.steps=2"]
    config = load_config(None, sizes)
    config.env.rewards = scene.rewards
    supply, policy, batches = Supply(scene.buffer.learner, config, first_group_id=0), Policy(), []
    held_out = msgspec.structs.replace(ticket(0, num_members=1), task=Task(env="shop", split="held_out", index=0))
    scene.evaluations.learner.open([held_out])
    async with scene.playing(policy, shutdown):
        for version in (0, 1):
            if version > policy.policy_version:
                await policy.gets(version)
            batch = await asyncio.to_thread(supply.next_batch, ahead_of(version + 1, version), shutdown)
            batches.append(batch)
        await until(lambda: scene.evaluations.ledger.ready == 1)
    for version, batch in enumerate(batches):
        assert len(batch.groups) == 2
        for group in batch.groups:
            check_marks(group.trajectories, version=version)
    (evaluated,) = scene.evaluations.learner.claim(1, 1, policy_version=0, max_lag=0)
    assert evaluated.trajectories[0].part_values == {}
    assert scene.buffer.audit() == [] == scene.evaluations.audit()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "3 answers were malformed"),
        ({"max_requests": 2}, "the budget of this run is spent: max_requests is 2, and it has used 2"),
        ({"max_total_tokens": 1}, "the budget of this run is spent: max_total_tokens is 1"),
        ({"max_chars": 1000, "rubric": ENDLESS}, "leaves no room in `model.max_tokens` = 8192; lower max_chars"),
    ],
)
async def test_a_policy_that_cannot_judge_drops_the_group_with_its_reason_and_never_gives_zeros(
    redis_client: redis.Redis, run_id: str, shutdown: Shutdown, settings: dict[str, Any], why: str
) -> None:
    scene = Scene(redis_client, run_id, max_attempts=1, **settings)
    scene.opens(0)
    async with scene.playing(Policy(lambda request: "They are all great."), shutdown):
        await until(lambda: scene.buffer.ledger.dropped == {"judge_failed": 1})
    assert why in scene.buffer.learner.failures()[0].reason
    assert scene.buffer.ledger.failed == {"judge_failed": 1} and scene.buffer.audit() == []


def test_an_actor_process_judges_and_books_on_the_account_of_the_run(
    redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    env, folder = "tests.guess:GuessEnv", tmp_path / "model"
    sizes = [f"model.max_tokens={MAX_TOKENS}", f"learner.micro_batch_tokens={MAX_TOKENS}"]
    config = load_config(None, [f"run.name={run_id}", f"env.name={env}", *sizes])
    config.env.rewards = {"better": {**BETTER, "max_requests": 100}}
    TOKENIZER.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # the engine reads no weights
    model = {"model_path": str(folder), "tokenizer_root": tokenizer_root(load_tokenizer(folder))}
    tickets, fleet = [ticket(group_id, env=env, is_judged=True) for group_id in range(2)], Fleet(redis_client, run_id)
    buffer = make_buffer(redis_client, run_id).start(*tickets)
    fleet.describe_run(msgspec.structs.replace(FACTS, config_yaml=dump_config(config), **model))
    fleet.set_run_state(RunState.TRAINING)
    command = [sys.executable, "-m", "tests.actors.judging_actor", "a", f"run.name={run_id}", f"redis.url={redis_url}"]
    process = Process("a", command, log=tmp_path / "a.log", environment={})
    wait_until(lambda: buffer.ledger.ready == 2, "both groups are judged", process)
    fleet.set_run_state(RunState.FINISHED)
    assert process.wait() == 0
    for group in buffer.learner.claim(1, 2, policy_version=0, max_lag=0):
        assert all(member.part_values["better_policy_version"] == 0 for member in group.trajectories)
    assert JudgeAccount(redis_client, run_id).add("env.rewards.better", 0, 0, 0.0)[0] == 2
    assert buffer.ledger.failed == {} and buffer.audit() == []
