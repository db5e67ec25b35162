"""Eight mistakes that systems like this one have made in the open, each shown to be impossible or refused here."""

import asyncio
from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np
import pytest
import redis

from slipstream.actors.engine.vllm_engine import check_prompt
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.group import Episodes, EpisodeSetup, rollout_group
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.process.wire import WireError, encode
from slipstream.common.records.trajectory import (
    InvalidTrajectory,
    Outcome,
    StopReason,
    Task,
    Trajectory,
    decode_trajectory,
)
from slipstream.common.text.action_format import FORMATS
from slipstream.envhub.env import Observation
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.supply.supply import Supply
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.actors.episode.episodes import ALLOWANCE, Script, attempt_on, engine_of, expert, ids, play
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer, shop_tokenizer
from tests.learner.supply.test_supply import config, differ, work
from tests.replay.records.attempts import attempt_at, make_buffer, ticket


class ForgetsRewards(ShopEnv):
    """A shop whose pages come without rewards."""

    async def step(self, action: str) -> Observation:
        return replace(await super().step(action), rewards={})


class RaisesOnBuying(ShopEnv):
    """A shop whose till breaks down: the one place where a reward would be earned."""

    async def step(self, action: str) -> Observation:
        if action.startswith("click [ buy"):
            raise RuntimeError("the till is broken")
        return await super().step(action)


def remembered(script: Script, prompts: list[list[int]], written: list[list[int]]) -> Script:
    """`script`, with what it was given and what it wrote noted down."""

    def write(tokens: list[int], seed: int | None) -> list[int]:
        prompts.append(list(tokens))
        written.append(script(tokens, seed))
        return written[-1]

    return write


def expert_episode(env: ShopEnv, index: int = 0) -> Trajectory:
    return play(env, engine_of(expert(env, shop_tokenizer())), attempt=attempt_on(index))


def test_a_reward_that_is_missing_is_an_error_and_does_not_arrive_as_0() -> None:
    env = ForgetsRewards()
    with pytest.raises(EpisodeFailed, match="step returned no rewards"):
        expert_episode(env)
    whole = msgspec.to_builtins(expert_episode(ShopEnv()), builtin_types=(bytes,))
    del whole["turns"][4]["rewards"]
    nameless = msgspec.defstruct("Nameless", [(name, object) for name in whole])(**whole)
    with pytest.raises(WireError, match=r"missing required field `rewards` - at `\$\.turns\[4\]`"):
        decode_trajectory(encode(nameless), max_bytes=1 << 20, vocab_size=100)
    whole["turns"][4]["rewards"] = {}
    empty = msgspec.defstruct("Empty", [(name, object) for name in whole])(**whole)
    with pytest.raises(InvalidTrajectory, match="has no reward; a reward of 0 must be given too"):
        decode_trajectory(encode(empty), max_bytes=1 << 20, vocab_size=100)


def test_steps_visit_new_tasks_in_a_seeded_order_and_a_group_holds_one_task(
    redis_client: redis.Redis, run_id: str
) -> None:
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    supply = Supply(buffer.learner, config("env.num_train_tasks=8", "run.seed=3"), first_group_id=0)
    opened: list[int] = []
    for step in range(1, 7):
        supply.admit(step, [], published_version=0)
        opened += [lease.ticket.task.index for lease in work(buffer.actor, run_id, returns=differ)]
        for group in buffer.learner.claim(step, 2, policy_version=0, max_lag=4):
            assert {member.task for member in group.trajectories} == {group.ticket.task}
    assert len(opened) == 14  # two groups a step, and one step ahead
    assert sorted(opened[:8]) == list(range(8))
    assert len(set(opened[8:])) == 6
    assert opened[:8] != list(range(8))
    buffer.learner.open([ticket(100)])
    lease = buffer.actor.lease("a")
    assert lease is not None
    stranger = msgspec.structs.replace(
        attempt_at(lease, 0, run_id=run_id), task=Task(env="shop", split="train", index=9)
    )
    with pytest.raises(InvalidTrajectory, match="the ticket's is"):
        buffer.actor.insert(lease, stranger)


def test_sampled_tokens_reach_the_learner_as_sampled_and_not_as_their_text_would_be_encoded() -> None:
    tokenizer, env = merging_tokenizer(CHATML), ShopEnv()

    def letter_by_letter(tokens: list[int], seed: int | None) -> list[int]:
        letters = [ids(tokenizer, letter)[0] for letter in env.expert().replace("plain", "ab plain")]
        return [*letters, tokenizer.eos_token_id]

    written: list[list[int]] = []
    trajectory = play(
        env,
        engine_of(remembered(letter_by_letter, [], written), max_tokens=2048),
        tokenizer=tokenizer,
        allowance=replace(ALLOWANCE, max_turns=3, max_tokens=2048),
    )
    (sequence,) = sequences_of(trajectory, advantage=1.0)
    assert sequence.tokens[sequence.loss_mask].tolist() == list(chain.from_iterable(written))
    assert ids(tokenizer, tokenizer.decode(written[0])) != written[0]  # else this test would show nothing


def test_an_episode_that_outgrows_the_context_ends_and_loses_nothing_on_the_left() -> None:
    env = ShopEnv()
    engine = engine_of(expert(env, shop_tokenizer()), max_tokens=50)
    cut = play(env, engine, allowance=replace(ALLOWANCE, max_tokens=50))
    whole = expert_episode(ShopEnv())
    assert cut.stop_reason is StopReason.MAX_TOKENS
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    with pytest.raises(ValueError, match=r"a prompt of 50 tokens.*leave room for 1 more in `model\.max_tokens` = 50"):
        check_prompt([1] * 50, max_tokens=50, vocab_size=100)
    with pytest.raises(ValueError, match=r"`model\.max_tokens` = 50"):
        asyncio.run(engine.generate([1] * 50, attempt_on().sampling))


def test_an_exception_in_the_environment_is_redone_then_dropped_and_never_trained_as_a_reward_of_0(
    redis_client: redis.Redis, run_id: str
) -> None:
    buffer = make_buffer(redis_client, run_id, max_attempts=2)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(0)])
    lease = buffer.actor.lease("actor-0")
    assert lease is not None
    tokenizer = shop_tokenizer()

    def search_look_and_buy(tokens: list[int], seed: int | None) -> list[int]:
        page = tokenizer.decode(tokens).split("<|user|>")[-1]
        if "under" in page:
            return ids(tokenizer, "search[dress]<|end|>")
        return ids(tokenizer, "click[buy now]<|end|>")

    setup = EpisodeSetup(
        run_id=run_id,
        actor="actor-0",
        envs={"shop": MixtureEntry(name=f"{__name__}:RaisesOnBuying")},
        engine=ScriptedEngine(
            search_look_and_buy, policy_version=0, schedule=Schedule(token_time_s=0.0), max_tokens=256
        ),
        tokenizer=tokenizer,
        action_format=FORMATS["plain"],
        allowance=ALLOWANCE,
        provenance=attempt_on().provenance,
        episodes=Episodes(),
    )
    asyncio.run(rollout_group(lease, setup=setup, buffer=buffer.actor))
    ledger = buffer.learner.ledger()
    assert ledger.dropped == {"env_failure": 1}
    assert (ledger.inserted, ledger.ready) == (0, 0)
    assert ledger.redone_members in (1, 2)  # the first member to run out of attempts ends the group for both
    assert "the till is broken" in buffer.learner.failures()[0].reason
    failed = msgspec.structs.replace(
        attempt_at(lease, 0, run_id=run_id), stop_reason=StopReason.ENV_ERROR, outcome=Outcome.ENV_FAILURE
    )
    with pytest.raises(InvalidTrajectory, match=r"env_failure, expected policy: .*report the others with fail"):
        buffer.actor.insert(lease, failed)


def test_prompt_tokens_are_outside_the_loss_mask() -> None:
    env, tokenizer = ShopEnv(), shop_tokenizer()
    prompts: list[list[int]] = []
    written: list[list[int]] = []
    trajectory = play(env, engine_of(remembered(expert(env, tokenizer), prompts, written)))
    packed = pack(sequences_of(trajectory, advantage=1.0))
    expected = np.zeros(trajectory.num_tokens, dtype=bool)
    for prompt, turn in zip(prompts, written, strict=True):
        expected[len(prompt) : len(prompt) + len(turn)] = True
    assert packed.loss_mask.tolist() == expected.tolist()
    assert packed.tokens[packed.loss_mask].tolist() == list(chain.from_iterable(written))


@pytest.mark.parametrize("name", FORMATS)
def test_the_prompt_asks_for_the_tag_that_the_parser_demands(name: str) -> None:
    action_format = FORMATS[name]
    assert action_format.opening in action_format.instructions
    assert action_format.closing in action_format.instructions
    assert action_format.parse(action_format.write("click[buy now]")).text == "click[buy now]"
    env, tokenizer = ShopEnv(), shop_tokenizer(name)
    prompts: list[list[int]] = []
    script = remembered(expert(env, tokenizer, action_format), prompts, [])
    trajectory = play(env, engine_of(script), tokenizer=tokenizer, action_format=action_format)
    assert all(turn.valid_action for turn in trajectory.turns)
    assert trajectory.success
    assert tokenizer.decode(ids(tokenizer, action_format.instructions)) in tokenizer.decode(prompts[0])


def test_nothing_of_an_episode_reaches_the_next_one_of_the_same_environment() -> None:
    used = ShopEnv()
    prompts_of_used: list[list[int]] = []
    prompts_of_fresh: list[list[int]] = []
    expert_episode(used, index=1)
    for env, prompts in ((used, prompts_of_used), (ShopEnv(), prompts_of_fresh)):
        play(env, engine_of(remembered(expert(env, shop_tokenizer()), prompts, [])))
    assert prompts_of_used == prompts_of_fresh
    opening = "<|user|> find plain dress red small under 25 <|end|> <|assistant|>"
    assert prompts_of_used[0] == ids(shop_tokenizer(), opening)
