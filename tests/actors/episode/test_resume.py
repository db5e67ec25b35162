"""A preempted episode continues elsewhere as if nothing had happened; in another world it does not continue at all."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.wire import encode
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import (
    Outcome,
    Sampling,
    StopReason,
    Trajectory,
    VersionSpan,
    decode_trajectory,
)
from slipstream.envhub.env import Env, Observation
from slipstream.envhub.household.household import HouseholdEnv
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.lab.soak.scripted_engine import ScriptedEngine
from tests.actors.episode.episodes import ALLOWANCE, Script, attempt_on, engine_of, expert, ids, rollout_of, timeless
from tests.common.text.small_tokenizer import CHATML, FORGETS_THOUGHTS, merging_tokenizer, shop_tokenizer
from tests.learner.skipping_loop import run_skipping

STEP_S = 3.0
TOKEN_TIME_S = 1.0
LONG = replace(ALLOWANCE, max_tokens=8192)


class Slow:  # before an environment
    async def step(self, action: str) -> Observation:
        await asyncio.sleep(STEP_S)
        return await super().step(action)


class SlowShop(Slow, ShopEnv): ...


class SlowHousehold(Slow, HouseholdEnv): ...


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    env: type[Env]
    tokenizer: PreTrainedTokenizerBase
    pieces: Callable[[str], list[str]]  # the text, in pieces that are encoded one by one
    thought: str = ""  # written before every action
    model: ModelConfig = field(default_factory=ModelConfig)
    cut_every_s: float = 2.0


SHOP = World(env=SlowShop, tokenizer=shop_tokenizer(), pieces=str.split)
FORGETS = {"tokenizer": merging_tokenizer(FORGETS_THOUGHTS), "pieces": list, "thought": "<think>ab a</think>"}
WORLDS = {
    "shop": SHOP,
    "household": World(env=SlowHousehold, tokenizer=merging_tokenizer(CHATML), pieces=list),
    "a history that is rewritten": replace(SHOP, **FORGETS, cut_every_s=7.0),
    "a window": replace(SHOP, model=ModelConfig(context="window", max_tokens=100)),
}


class Sampled:
    """The scripted engine with log-probabilities, versions and kept sets by the seed. Notes what it was asked."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.asked: list[tuple[list[int], int | None]] = []

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        self.asked.append((list(tokens), seed))
        completion = await self._engine.generate(tokens, sampling, seed=seed)
        chance, num_tokens = random.Random(seed), len(completion.tokens)
        middle = chance.randrange(1, num_tokens)
        sets = [sorted({token, *(chance.randrange(20) for _ in range(3))}) for token in completion.tokens]
        return replace(
            completion,
            kept=kept_sets(sets) if sampling.is_cut else None,
            logprobs=[-chance.random() for _ in completion.tokens],
            version_spans=[
                VersionSpan(start=0, stop=middle, policy_version=4),
                VersionSpan(start=middle, stop=num_tokens, policy_version=5 + chance.randrange(2)),
            ],
        )


def wandering(env: Env, world: World) -> Script:
    """Does what the seed says: the expert's action, another that makes sense, or nonsense."""

    def write(tokens: list[int], seed: int | None) -> list[int]:
        chance = random.Random(seed)
        action = chance.choice([env.expert(), chance.choice(env.admissible() or []), "ab a"])
        pieces = world.pieces(world.thought + action)
        return [token for piece in pieces for token in ids(world.tokenizer, piece)] + [world.tokenizer.eos_token_id]

    return write


async def played(world: World, record: EpisodeRecord, asked: list[tuple[list[int], int | None]]) -> Trajectory:
    """The rest of the episode on `record`, in an environment and an engine of its own."""
    env = world.env()
    sampler = Sampled(engine_of(wandering(env, world), max_tokens=LONG.max_tokens, token_time_s=TOKEN_TIME_S))
    allowance = replace(LONG, model=world.model)
    try:
        return await rollout_of(env, sampler, record=record, tokenizer=world.tokenizer, allowance=allowance)
    finally:
        asked += sampler.asked


async def preempted(playing: Coroutine[Any, Any, Trajectory], *, after_s: float) -> None:
    """Cut an episode short. Fails where it is over before."""
    task = asyncio.create_task(playing)
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def over_the_wire(partial: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Trajectory:
    return decode_trajectory(encode(partial), max_bytes=1 << 20, vocab_size=len(tokenizer))


@cache
def expert_partial() -> Trajectory:
    env, record = SlowShop(), EpisodeRecord(attempt=attempt_on())
    sampler = engine_of(expert(env, shop_tokenizer()), token_time_s=TOKEN_TIME_S)
    run_skipping(preempted(rollout_of(env, sampler, record=record), after_s=30.0))
    assert len(record.turns) == 3
    return over_the_wire(record.partial(), shop_tokenizer())


async def resumed_by_expert(partial: Trajectory, attempt: Attempt) -> Trajectory:
    env = ShopEnv()
    return await rollout_of(env, engine_of(expert(env, shop_tokenizer())), record=resumed_record(attempt, partial))


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_an_episode_cut_anywhere_and_gone_on_with_elsewhere_is_the_uninterrupted_one(world: World) -> None:
    """Cut once in each interval of `cut_every_s`: in the middle of a generation, of a step, and between them."""
    attempt = replace(attempt_on(), sampling=Sampling(temperature=1.0, top_p=0.9, top_k=5, max_turn_tokens=200))

    async def whole() -> tuple[Trajectory, list[tuple[list[int], int | None]], float]:
        asked: list[tuple[list[int], int | None]] = []
        return await played(world, EpisodeRecord(attempt=attempt), asked), asked, asyncio.get_running_loop().time()

    uninterrupted, asked_once, took_s = run_skipping(whole())
    assert len(uninterrupted.turns) > 3
    if world.model.context == "window":
        assert len(uninterrupted.branch_starts) > 1
    assert uninterrupted.kept is not None
    nums_of_turns, num_cut_in_steps = set(), 0
    for cut in range(1, int(took_s / world.cut_every_s)):
        record = EpisodeRecord(attempt=attempt)
        asked: list[tuple[list[int], int | None]] = []
        run_skipping(preempted(played(world, record, asked), after_s=cut * world.cut_every_s - 0.5))
        if not record.turns:
            continue
        num_cut_in_steps += len(record.tokens) > record.prompt_stop
        partial = over_the_wire(record.partial(), world.tokenizer)
        assert (partial.stop_reason, partial.outcome) == (StopReason.PREEMPTED, Outcome.PREEMPTED)
        assert uninterrupted.tokens.startswith(partial.tokens)
        assert timeless(uninterrupted).turns[: len(partial.turns)] == timeless(partial).turns
        num_asked = len(asked)
        resumed = run_skipping(played(world, resumed_record(attempt, partial), asked))
        assert timeless(resumed) == timeless(uninterrupted)
        assert resumed.turns[: len(partial.turns)] == partial.turns  # their times too are those of the first life
        assert asked[:num_asked] == asked_once[:num_asked]
        assert asked[num_asked:] == asked_once[len(partial.turns) :]  # prompts and seeds; nothing recorded again
        nums_of_turns.add(len(partial.turns))
    assert nums_of_turns == set(range(1, len(uninterrupted.turns)))
    assert num_cut_in_steps > 0


def test_an_episode_may_be_preempted_again_and_in_the_middle_of_its_replay() -> None:
    world, attempt = SHOP, attempt_on()
    uninterrupted = run_skipping(played(world, EpisodeRecord(attempt=attempt), []))
    record = EpisodeRecord(attempt=attempt)
    for after_s in (30.0, STEP_S / 2, 30.0):  # the second falls into the first step that is done again
        num_turns = len(record.turns)
        run_skipping(preempted(played(world, record, []), after_s=after_s))
        assert (len(record.turns) > num_turns) == (after_s == 30.0)
        record = resumed_record(attempt, over_the_wire(record.partial(), world.tokenizer))
    assert timeless(run_skipping(played(world, record, []))) == timeless(uninterrupted)


def test_the_time_of_an_episode_is_that_of_all_its_lives_and_its_clock_and_attempt_are_those_of_one() -> None:
    """A clock that continued would never let a long task end on hosts that leave."""
    partial = msgspec.structs.replace(expert_partial(), started_at_s=1.7e9, duration_s=2 * ALLOWANCE.episode_timeout_s)
    resumed = run_skipping(resumed_by_expert(partial, replace(attempt_on(), attempt=2, actor="actor-1")))
    assert (resumed.outcome, resumed.success, resumed.attempt, resumed.actor) == (Outcome.POLICY, True, 2, "actor-1")
    assert resumed.started_at_s == 1.7e9
    assert partial.duration_s < resumed.duration_s < partial.duration_s + 60.0


class Changed(ShopEnv):
    """A shop whose second answer is not what it was."""

    def __init__(self, *, key: str = "", **changes: Any) -> None:
        super().__init__()
        self._key = key
        self._changes = changes
        self._num_steps = 0

    def state_key(self) -> str:
        return self._key if self._key and self._num_steps == 2 else super().state_key()

    async def step(self, action: str) -> Observation:
        self._num_steps += 1
        observation = await super().step(action)
        return replace(observation, **self._changes) if self._num_steps == 2 else observation


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (Changed(messages=(Message("user", "sold out"),)), "the answer to turn 1 differs from the recorded one"),
        (Changed(rewards={"purchase": 0.5}), r"turn 1 are {'purchase': 0.5}, recorded {'purchase': 0.0}"),
        (Changed(rewards={}), r"the rewards of turn 1 are {}, recorded"),
        (Changed(rewards={"purchase": 0.0, "time": 0.0}), "the rewards of turn 1 are"),
        (Changed(valid_action=False), "the action of turn 1 was recorded as valid"),
        (Changed(key="another room"), "the state before turn 2 differs from the recorded one"),
        (Changed(terminated=True), "the episode ends with turn 1, and the recorded one continued"),
        (Changed(truncated=True), "the episode ends with turn 1"),
        (ShopEnv(profile="full"), "the first messages differ from those recorded"),
    ],
)
def test_an_environment_that_answers_otherwise_is_a_mismatch_and_nothing_is_sampled(env: Env, complaint: str) -> None:
    sampler = Sampled(engine_of(expert(env, shop_tokenizer()), max_tokens=LONG.max_tokens))
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        run_skipping(rollout_of(env, sampler, record=resumed_record(attempt_on(), expert_partial())))
    assert (failed.value.stop_reason, failed.value.outcome) == (StopReason.REPLAY_MISMATCH, Outcome.REPLAY_MISMATCH)
    assert sampler.asked == []
