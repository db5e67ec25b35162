"""The requirements of every environment: one suite over all of them, with several options each."""

import asyncio
import gc
import math
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from slipstream.actors.episode.answer import answer
from slipstream.common.text.action_format import FORMATS
from slipstream.envhub.catalogue import ENVS, make_env
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.world import WorldEnv
from tests.envhub.env_cases import CASES, FULL_LENGTH, Case, back, do_all, offered, rollout, some_actions, texts

GARBAGE = [
    *("", " ", "hello", "\x00", "🙂", "[" * 5000, "OPEN", "<action>look</action>", "{'name': 1}"),
    *("search[", "search[]", "click[]", "click[nothing]", "click[buy now", "search[a]click[b]", "answer("),
    *("go to", "go to fridge 99999999999999999999", "take mug 1", "get -1 log"),
]

BLANKS = " " * 20_000
OPENINGS = (
    *("sql SELECT 1", "commit", "click", "type 1 a", "goto /", "view a", "edit a 1", "bash ls", "submit", "take mug"),
    *("get", "craft 1 a using", "keep", "python", "Act: bash\n```bash\nls", "get_relations", "answer"),
)
LONG = [
    *(f"{opening}{BLANKS}x" for opening in OPENINGS),
    *(f"{opening}{BLANKS}" for opening in ("search[", "click[", "get_relations(", "count (", "answer(", "bash\n```")),
]

# Memory that the code of the environments has allocated, directly or not. Other tests of this process allocate too.
ITS_OWN, NUM_FRAMES = tracemalloc.Filter(True, "*/envhub/*", all_frames=True), 12
FLAT_BYTES = 20_000
WORD = re.compile(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]")  # the words of the tiny model's tokenizer

# The texts of a world that would reveal its answer. The openings of the other environments have nothing to hide.
SECRETS: dict[str, Callable[[Any], Iterable[str]]] = {
    "shop": lambda world: [world.store.goal.product_id],
    "kg": lambda world: world.question.answer,
    "sqldb": lambda world: [str(cell) for row in world.right.rows for cell in row],
    "web": lambda world: [errand.secret for errand in world.errands if errand.secret],
    "research": lambda world: [world.question.answer],
    "tools": lambda world: [found for errand in world.errands for found in errand.found],
    "shell": lambda world: [world.job.answer] if world.job.answer else [],
    "code": lambda world: [world.problem.program],
    "swe": lambda world: [bug.right.strip() for bug in world.repo.bugs.values()],
}

every_env = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_environment_of_the_catalogue_is_tested_here() -> None:
    assert {case.name for case in CASES} == set(ENVS)


@every_env
def test_the_same_task_and_actions_give_the_same_episode_on_every_instance(case: Case) -> None:
    env, fresh, rng = case.make(), case.make(), random.Random(1)
    for index in range(case.count(10)):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, case, task, rng, 8))
        first = asyncio.run(do_all(env, task, actions))
        assert asyncio.run(do_all(env, task, actions)) == first
        assert asyncio.run(do_all(fresh, task, actions)) == first


@every_env
def test_reset_leaves_nothing_of_the_episode_before(case: Case) -> None:
    used, fresh, rng = case.make(), case.make(), random.Random(2)
    for index in range(case.count(10)):
        asyncio.run(some_actions(used, case, case.task("train", 100 + index), rng, 10))
        task = case.task("train", index)
        assert asyncio.run(used.reset(task)) == asyncio.run(fresh.reset(task))
        assert used.state_key() == fresh.state_key()
        assert used.admissible() == fresh.admissible()
        if not used.replay_only:
            assert used.snapshot() == fresh.snapshot()


@every_env
def test_train_and_held_out_tasks_share_no_text(case: Case) -> None:
    env, count = case.make(), case.count(300)
    openings = {
        split: {texts([asyncio.run(env.reset(case.task(split, index)))]) for index in range(count)}
        for split in ("train", "held_out")
    }
    assert not openings["train"] & openings["held_out"]
    # The small shop has 1190 held-out texts; 300 draws contain about 265 of them.
    assert min(len(opening) for opening in openings.values()) > case.distinct * count


@every_env
def test_no_opening_and_no_refusal_reveals_the_answer(case: Case) -> None:
    env = case.make()
    assert isinstance(env, WorldEnv)
    for index in range(case.count(50)):
        opening = asyncio.run(env.reset(case.task("train", index)))
        shown = texts([opening, asyncio.run(env.step("?"))])
        for secret in SECRETS[case.name](env._started().world) if case.name in SECRETS else ():
            assert re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", shown) is None, secret


@every_env
def test_a_step_before_reset_and_an_unknown_split_are_refused(case: Case) -> None:
    env = case.make()
    with pytest.raises(EnvError, match="call reset first"):
        asyncio.run(env.step("look"))
    with pytest.raises(ValueError, match="split must be train or held_out, got 'test'"):
        asyncio.run(env.reset(case.task("test", 0)))


@every_env
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_expert_solves_its_tasks(case: Case, split: str) -> None:
    env, rng, count = case.make(), random.Random(3), case.count(100)
    ends = [asyncio.run(rollout(env, case, case.task(split, index), rng, noise=0))[-1] for index in range(count)]
    assert sum(end.success for end in ends) >= 0.95 * count


@every_env
def test_every_format_gives_back_what_the_expert_writes_in_it(case: Case) -> None:
    env = case.make()
    observation = asyncio.run(env.reset(case.task("train", 0)))
    for _ in range(case.max_turns):
        if observation.done:
            break
        action = env.expert()
        for action_format in FORMATS.values():
            assert action_format.parse(action_format.write(action)).text == action.strip()
        observation = asyncio.run(env.step(action))


@every_env
def test_the_expert_recovers_from_any_unfinished_state(case: Case) -> None:
    env, rng, count = case.make(), random.Random(4), case.count(50)
    solved = 0
    for index in range(count):
        asyncio.run(some_actions(env, case, case.task("train", index), rng, 6))
        observation = Observation(messages=(), rewards={})
        for _ in range(case.max_turns):
            observation = asyncio.run(env.step(env.expert()))
            if observation.done:
                break
        solved += observation.success
    assert solved >= case.recovers * count


@every_env
def test_the_expert_copes_with_its_own_mistakes(case: Case) -> None:
    env, rng, count = case.make(), random.Random(5), case.count(100)
    ends = [asyncio.run(rollout(env, case, case.task("train", index), rng, noise=0.3))[-1] for index in range(count)]
    assert all(end.done for end in ends)
    assert sum(end.success for end in ends) >= case.noisy_success * count


@every_env
def test_a_restored_snapshot_goes_on_as_the_original(case: Case) -> None:
    env, other, rng = case.make(), case.make(), random.Random(6)
    for index in range(case.count(10)):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, case, task, rng, 10))
        observations = asyncio.run(do_all(env, task, actions[:5]))
        if env.replay_only:
            assert asyncio.run(do_all(other, task, actions[:5])) == observations
            assert other.state_key() == env.state_key()
            continue
        state = env.snapshot()
        rest = [asyncio.run(env.step(action)) for action in actions[5:]]
        for continued in (env, other):
            assert continued.restore(state) == observations[-1]
            assert continued.snapshot() == state
            assert [asyncio.run(continued.step(action)) for action in actions[5:]] == rest
        assert env.state_key() == other.state_key()


@every_env
def test_snapshots_of_the_start_and_of_the_end_restore(case: Case) -> None:
    env, rng = case.make(), random.Random(7)
    start = asyncio.run(env.reset(case.task("train", 0)))
    if env.replay_only:
        with pytest.raises(NotImplementedError):
            env.snapshot()
        return
    state = env.snapshot()
    asyncio.run(env.step(env.expert()))
    assert env.restore(state) == start
    end = asyncio.run(rollout(env, case, case.task("train", 0), rng, noise=0))[-1]
    other = case.make()
    assert other.restore(env.snapshot()) == end
    with pytest.raises(EnvError, match="is over; call reset first"):
        asyncio.run(other.step("look"))


@every_env
def test_bytes_that_are_no_snapshot_are_refused_and_change_nothing(case: Case) -> None:
    env, rng = case.make(), random.Random(8)
    asyncio.run(some_actions(env, case, case.task("train", 0), rng, 5))
    if env.replay_only:
        with pytest.raises(NotImplementedError):
            env.restore(b"")
        return
    state, key = env.snapshot(), env.state_key()
    other_length = b"SL\x02\x00\xff\xff\xff\xff" + state
    for garbage in (b"", b"garbage", state[:-1], state + b"x", rng.randbytes(200), other_length):
        with pytest.raises(ValueError, match=r"frame|shorter|magic"):
            env.restore(garbage)
    for _ in range(case.count(200)):
        position = rng.randrange(len(state))
        flipped = state[:position] + bytes([state[position] ^ (1 << rng.randrange(8))]) + state[position + 1 :]
        try:
            env.restore(flipped)
        except ValueError:
            continue
        env.admissible()  # a flipped bit may give another valid state, which must then work
        env.restore(state)
    assert env.state_key() == key


@every_env
def test_a_snapshot_of_other_options_is_refused(case: Case) -> None:
    env = case.make()
    if env.replay_only:
        pytest.skip("it takes no snapshots")
    asyncio.run(env.reset(case.task("train", 0)))
    other = make_env(case.name, case.other_options)
    with pytest.raises(ValueError, match=r"the snapshot is of .*, but this environment is "):
        other.restore(env.snapshot())


@every_env
def test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned(case: Case) -> None:
    env, rng = case.make(), random.Random(9)
    for index in range(case.count(200)):
        observations = asyncio.run(rollout(env, case, case.task("train", index), rng, noise=1.0))
        for observation in observations[1:]:
            assert observation.rewards.keys() == observations[1].rewards.keys() != set()
            assert all(math.isfinite(reward) for reward in observation.rewards.values())
            assert 0.0 <= observation.score <= 1.0
            assert observation.success == (observation.score == 1.0)
            assert observation.done or observation.score == 0.0
            assert not (observation.terminated and observation.truncated)
            assert observation.messages and all(message.content for message in observation.messages)


@every_env
def test_garbage_is_an_observation_and_leaves_the_state_alone(case: Case) -> None:
    env, rng = case.make(), random.Random(10)
    for index in range(case.count(50)):
        asyncio.run(some_actions(env, case, case.task("train", index), rng, rng.randrange(5)))
        key, listed = env.state_key(), env.admissible()
        noise = "".join(chr(rng.randrange(32, 0x3000)) for _ in range(rng.randrange(40)))
        for action in (*GARBAGE, noise):
            observation = asyncio.run(env.step(action))
            assert not observation.valid_action, action
            assert not observation.done
            assert set(observation.rewards.values()) == {0.0}
            assert all(message.content.encode() for message in observation.messages)
        assert (env.state_key(), env.admissible()) == (key, listed)


@every_env
def test_no_action_takes_long_to_read(case: Case) -> None:
    """While an action is parsed, nothing else in the process runs, not even its timeout."""
    env = case.make()
    for action in LONG:
        asyncio.run(env.reset(case.task("train", 0)))
        began = time.process_time()
        asyncio.run(env.step(action))
        assert time.process_time() - began < 5, action[:30]


@every_env
def test_a_state_has_one_key_however_long_ago_it_was_reached(case: Case) -> None:
    """The key contains no step counter: actions that end in the same state leave it unchanged."""
    env, rng = case.make(), random.Random(14)
    for index in range(case.count(10)):
        actions = asyncio.run(some_actions(env, case, case.task("train", index), rng, 6))
        key = env.state_key()
        if not env.replay_only:
            state = env.snapshot()
            asyncio.run(env.step(env.expert()))
            env.restore(state)
            assert env.state_key() == key
        for _ in range(3):
            asyncio.run(env.step("no such action"))
        assert env.state_key() == key != ""
        asyncio.run(do_all(env, case.task("train", index), actions))
        assert env.state_key() == key


@every_env
def test_members_of_a_group_reach_equal_states(case: Case) -> None:
    """GiGPO compares the members of a group in the states that several of them reach."""
    keys: list[set[str]] = []
    for seed in range(2):
        env, task = case.make(), case.task("train", 3)
        actions = asyncio.run(some_actions(env, case, task, random.Random(seed), case.count(30)))
        asyncio.run(env.reset(task))
        met = {env.state_key()}
        for action in actions:
            asyncio.run(env.step(action))
            met.add(env.state_key())
        keys.append(met)
    assert keys[0] & keys[1]
    assert len(keys[0]) > 1 or case.samples  # the samples only look and change nothing


@every_env
def test_every_admissible_action_is_understood(case: Case) -> None:
    env, rng = case.make(), random.Random(11)
    for index in range(case.count(10)):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, case, task, rng, 5))
        listed, state = offered(env, case), None if env.replay_only else env.snapshot()
        assert len(set(listed)) == len(listed) > 0
        for action in listed:
            assert asyncio.run(env.step(action)).valid_action, action
            asyncio.run(back(env, state, task, actions))


@pytest.mark.parametrize("case", [case for case in CASES if case.is_spaced], ids=str)
def test_white_space_around_words_and_brackets_does_not_matter(case: Case) -> None:
    env, rng = case.make(), random.Random(12)
    for index in range(case.count(10)):
        task = case.task("train", index)
        actions = asyncio.run(some_actions(env, case, task, rng, 5))
        expected = asyncio.run(do_all(env, task, actions))
        assert asyncio.run(do_all(env, task, [" ".join(WORD.findall(action)) for action in actions])) == expected


@every_env
def test_a_slow_answer_is_cut_at_the_step_timeout(case: Case) -> None:
    """No environment suppresses the cancellation by which the rollout ends a turn that takes too long."""
    env = case.make()
    asyncio.run(env.reset(case.task("train", 0)))

    async def cancelled_while_it_waits() -> None:
        action = next(iter(env.admissible() or case.samples), None) or env.expert()  # not all have an expert
        turn = asyncio.ensure_future(answer(partial(env.step, action), timeout_s=60))
        await asyncio.sleep(0)
        if not turn.done():  # a turn that only computes is done before it can be cancelled
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
        await env.close()

    asyncio.run(cancelled_while_it_waits())


@every_env
def test_memory_stays_flat_over_many_episodes(case: Case) -> None:
    """All memory is measured first: the environments' own takes many times as long, and is at most as much."""
    env, rng = case.make(), random.Random(15)
    gc.collect()
    gc.freeze()  # what other tests have imported: no later search for garbage looks through it

    def growth(num_frames: int) -> int:
        held = []
        tracemalloc.start(num_frames)
        try:
            for _ in range(3):
                for index in range(334 if FULL_LENGTH else case.count(15)):
                    asyncio.run(rollout(env, case, case.task("train", index), rng, noise=0.2))
                asyncio.run(env.close())
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
                if num_frames > 1:
                    own = tracemalloc.take_snapshot().filter_traces([ITS_OWN])
                    held[-1] = sum(statistic.size for statistic in own.statistics("filename"))
        finally:
            tracemalloc.stop()
        # A leak grows in each of the three measurements; a cache is filled once.
        return min(held[1] - held[0], held[2] - held[1])

    assert growth(1) < FLAT_BYTES or growth(NUM_FRAMES) < FLAT_BYTES


@every_env
def test_step_after_the_end_is_an_error(case: Case) -> None:
    env, rng = case.make(), random.Random(13)
    assert asyncio.run(rollout(env, case, case.task("train", 1), rng, noise=0))[-1].done
    assert env.admissible() in ([], None)
    with pytest.raises(EnvError, match="is over; call reset first"):
        asyncio.run(env.step("look"))


@every_env
def test_close_may_be_called_twice_and_a_closed_one_starts_again(case: Case) -> None:
    env = case.make()
    start = asyncio.run(env.reset(case.task("train", 0)))
    asyncio.run(env.close())
    asyncio.run(env.close())
    assert asyncio.run(env.reset(case.task("train", 0))) == start


@every_env
def test_the_opening_has_a_system_message_with_rules_and_a_user_message(case: Case) -> None:
    observation = asyncio.run(case.make().reset(case.task("train", 0)))
    roles = ["system", "user"] if case.has_rules else ["user"]
    assert [message.role for message in observation.messages] == roles
    assert observation.rewards == {}
