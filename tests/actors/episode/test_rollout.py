"""One episode from reset to its record, with the real shop and a policy that follows a script."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from slipstream.actors.engine.engine import Completion, EngineError
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.records.trajectory import MAX_STATE_KEY, Outcome, Sampling, StopReason, Trajectory, VersionSpan
from slipstream.envhub.env import EnvError
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import sequences_of
from slipstream.tools.lab.soak.scripted_engine import ScriptedEngine
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, expert, failure_of, play, rollout_of, saying
from tests.common.text.small_tokenizer import END, FORGETS_THOUGHTS, merging_tokenizer, shop_tokenizer
from tests.learner.publisher.offers import empty_offer
from tests.learner.skipping_loop import run_skipping

TWO_TURNS = replace(ALLOWANCE, max_turns=2)


class Recorder:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.sequences: list[list[int]] = []  # each prompt with its completion

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        self.prompts.append(list(tokens))
        self.seeds.append(seed)
        completion = await self.engine.generate(tokens, sampling, seed=seed)
        self.sequences.append(tokens + completion.tokens)
        return completion


def buy(**changes: Any) -> tuple[Trajectory, Recorder]:
    env = ShopEnv()
    recorder = Recorder(engine_of(expert(env, shop_tokenizer())))
    return play(env, recorder, **changes), recorder


def test_an_episode_is_recorded_as_it_was_played_and_every_prompt_continues_the_one_before() -> None:
    trajectory, recorder = buy()
    assert shop_tokenizer().decode(trajectory.token_array()) == (
        "<|user|> find plain dress red small under 25 <|end|> "
        "<|assistant|> search [ plain dress ] <|end|> "
        "<|user|> plain dress 50 [SEP] plain dress 10 [SEP] light dress 50 [SEP] plain coat 40 <|end|> "
        "<|assistant|> click [ plain dress 10 ] <|end|> "
        "<|user|> plain dress 10 [SEP] color green grey red [SEP] size small medium large [SEP] buy now <|end|> "
        "<|assistant|> click [ red ] <|end|> "
        "<|user|> color red <|end|> "
        "<|assistant|> click [ small ] <|end|> "
        "<|user|> color red [SEP] size small <|end|> "
        "<|assistant|> click [ buy now ] <|end|>"
    )
    tokens = trajectory.token_array()
    sampled = [shop_tokenizer().decode(tokens[turn.start : turn.stop]) for turn in trajectory.turns]
    said = shop_tokenizer().decode(tokens).split("<|assistant|> ")[1:]
    assert sampled == [part.partition(" <|user|>")[0] for part in said] and len(sampled) == 5
    assert [turn.rewards for turn in trajectory.turns] == [{"purchase": 0.0}] * 4 + [{"purchase": 1.0}]
    assert all(turn.valid_action and turn.finish_reason == "stop" for turn in trajectory.turns)
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.DONE, Outcome.POLICY)
    assert (trajectory.score, trajectory.success, trajectory.branch_starts) == (1.0, True, [0])
    assert (trajectory.task.index, trajectory.group_id, trajectory.member, trajectory.actor) == (0, 3, 1, "actor-0")
    for earlier, later in zip(recorder.sequences, recorder.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert trajectory.token_array().tolist() == recorder.sequences[-1]


def test_every_generation_has_a_seed_of_its_own_and_the_same_in_another_run() -> None:
    seeds = buy()[1].seeds
    assert len(set(seeds)) == 5
    assert buy()[1].seeds == seeds
    assert not set(buy(attempt=replace(attempt_on(), member=2))[1].seeds) & set(seeds)
    assert not set(buy(attempt=replace(attempt_on(), attempt=1))[1].seeds) & set(seeds)


def test_out_of_turns_is_the_policys_own_end() -> None:
    script = saying(shop_tokenizer(), "search[dress]<|end|>", "click[red]<|end|>", "click[red]<|end|>")
    trajectory = play(ShopEnv(), engine_of(script), allowance=replace(ALLOWANCE, max_turns=3))
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.MAX_TURNS, Outcome.POLICY)
    assert [turn.valid_action for turn in trajectory.turns] == [True, False, False]
    assert (trajectory.total_reward, trajectory.success) == (0.0, False)
    assert trajectory.num_tokens == trajectory.turns[-1].stop  # the page after the last turn is not kept


def cut_off(max_tokens: int) -> Trajectory:
    env = ShopEnv()
    engine = engine_of(expert(env, shop_tokenizer()), max_tokens=max_tokens)
    trajectory = play(env, engine, allowance=replace(ALLOWANCE, max_tokens=max_tokens))
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.MAX_TOKENS, Outcome.POLICY)
    return trajectory


def test_out_of_context_is_the_policys_own_end_and_cuts_nothing_from_the_front() -> None:
    trajectory, whole = cut_off(50), buy()[0]
    assert trajectory.num_tokens <= 50
    assert trajectory.tokens == whole.tokens[: len(trajectory.tokens)]
    assert [turn.stop for turn in trajectory.turns] == [turn.stop for turn in whole.turns[:2]]
    (turn,) = cut_off(12).turns
    assert (turn.stop, turn.finish_reason, turn.valid_action) == (12, "length", False)


def test_a_turn_cut_by_length_is_closed_by_a_token_outside_the_loss_mask() -> None:
    tokenizer = shop_tokenizer()
    script = saying(tokenizer, "search[plain dress]<|end|>", "search[dress]<|end|>")
    trajectory = play(ShopEnv(), engine_of(script), attempt=attempt_on(max_turn_tokens=3), allowance=TWO_TURNS)
    cut = trajectory.turns[0]
    assert (cut.finish_reason, cut.valid_action, cut.stop - cut.start) == ("length", False, 3)
    assert trajectory.token_array()[cut.stop] == tokenizer.eos_token_id
    assert not trajectory.loss_mask_array()[cut.stop]
    assert tokenizer.decode(trajectory.token_array()[cut.stop :]).startswith("<|end|> <|user|> invalid <|end|>")


def test_an_episode_that_outlasts_its_clock_is_cut_and_not_blamed_on_the_policy() -> None:
    env = ShopEnv()
    engine = engine_of(expert(env, shop_tokenizer()), token_time_s=60.0)
    failure = failure_of(env, engine, complaint=r"longer than `env\.episode_timeout_s` = 600\.0 s")
    assert failure == (StopReason.TIME_LIMIT, Outcome.TRUNCATED)


def test_every_turn_is_recorded_with_the_state_that_its_action_was_chosen_in() -> None:
    trajectory, _ = buy()
    env = ShopEnv()

    async def keys() -> list[str]:
        await env.reset(trajectory.task)
        found = []
        for _ in trajectory.turns:
            found.append(env.state_key())
            await env.step(env.expert())
        return found

    expected = run_skipping(keys())
    assert [turn.state_key for turn in trajectory.turns] == expected
    assert len(set(expected)) == 5
    assert trajectory.turns[0].state_key.startswith("shop/train/0 ")


class Keyed(ShopEnv):
    """A shop whose state_key answers with whatever it is given, or raises it."""

    def __init__(self, key: object) -> None:
        super().__init__()
        self.key = key

    def state_key(self) -> str:
        if isinstance(self.key, Exception):
            raise self.key
        return self.key  # type: ignore[return-value]


def keys_of(key: object) -> list[str]:
    script = saying(shop_tokenizer(), "search[dress]<|end|>", "click[red]<|end|>")
    return [turn.state_key for turn in play(Keyed(key), engine_of(script), allowance=TWO_TURNS).turns]


def test_a_long_state_key_is_recorded_by_its_digest_and_stays_a_key() -> None:
    assert keys_of("") == ["", ""]
    assert keys_of("x" * MAX_STATE_KEY) == ["x" * MAX_STATE_KEY] * 2
    long = keys_of("the same room, " + "a chair, " * 500)
    assert long[0] == long[1] != keys_of("the same room, " + "a chair, " * 501)[0]
    assert len(long[0]) == MAX_STATE_KEY
    assert long[0].startswith("the same room, a chair, ")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (EnvError("the shop burnt down"), "the shop burnt down"),
        (NotImplementedError("later"), "state_key failed: NotImplementedError: later"),
        (None, "state_key failed: AttributeError"),
        (7, "state_key failed: AttributeError"),
        (b"bytes", "state_key failed: AttributeError"),
    ],
)
def test_a_state_key_that_is_no_text_is_an_env_failure(wrong: object, complaint: str) -> None:
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        keys_of(wrong)
    assert failed.value.outcome is Outcome.ENV_FAILURE


def test_a_request_that_the_engine_fails_is_an_infra_failure() -> None:
    def lose(tokens: list[int], seed: int | None) -> list[int]:
        raise EngineError("the request was lost")

    failure = failure_of(ShopEnv(), engine_of(lose), complaint="the request was lost")
    assert failure == (StopReason.INFRA_ERROR, Outcome.INFRA_FAILURE)


def test_versions_land_on_the_tokens_that_they_sampled() -> None:
    """Version 5 comes between the second and the third token of the second turn, 8.5 s after the start."""
    env = ShopEnv()
    engine = engine_of(expert(env, shop_tokenizer()), token_time_s=1.0)

    async def commit_in_mid_generation() -> Trajectory:
        playing = asyncio.create_task(rollout_of(env, engine))
        await asyncio.sleep(8.5)
        await engine.stage(empty_offer(5))
        await engine.commit(5)
        return await playing

    trajectory = run_skipping(commit_in_mid_generation())
    first, second, *later = trajectory.turns
    assert first.stop - first.start == 6
    assert trajectory.version_spans == [
        VersionSpan(start=first.start, stop=first.stop, policy_version=4),
        VersionSpan(start=second.start, stop=second.start + 2, policy_version=4),
        VersionSpan(start=second.start + 2, stop=second.stop, policy_version=5),
        *[VersionSpan(start=turn.start, stop=turn.stop, policy_version=5) for turn in later],
    ]
    assert ((trajectory.policy_version_array() > 0) == trajectory.loss_mask_array()).all()
    assert (trajectory.oldest_policy_version, trajectory.newest_policy_version) == (4, 5)


def test_a_template_that_rewrites_history_makes_branches_that_are_recorded_and_trained_apart() -> None:
    tokenizer = merging_tokenizer(FORGETS_THOUGHTS)
    turns = [
        f"<think>cheap</think>search[plain dress]{END}",
        f"<think>10</think>click[plain dress 10]{END}",
        f"click[red]{END}",
    ]
    recorder = Recorder(engine_of(saying(tokenizer, *turns), max_tokens=2048))
    attempt, allowance = attempt_on(max_turn_tokens=100), replace(ALLOWANCE, max_turns=3, max_tokens=2048)
    trajectory = play(ShopEnv(), recorder, tokenizer=tokenizer, attempt=attempt, allowance=allowance)
    assert len(trajectory.branch_starts) == 3  # the second and the third prompt each forget a thought
    branches = sequences_of(trajectory, advantage=1.0)
    assert [branch.tokens.tolist() for branch in branches] == recorder.sequences
    assert [tokenizer.decode(branch.tokens[branch.loss_mask]) for branch in branches] == turns
    assert "cheap" not in tokenizer.decode(recorder.prompts[1])
