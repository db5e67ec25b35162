"""`env.max_invalid_turns`: turns in a row without a valid action end an episode, in every way to play one."""

import asyncio
from dataclasses import replace

import pytest

from slipstream.actors.engine.engine import Sampler
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.resume import forked_record, resumed_record
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Fork, Outcome, StopReason, Trajectory, check
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.lab.peers.episode import Episode
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, play, rollout_of, saying
from tests.common.text.small_tokenizer import shop_tokenizer

NUM_TURNS = 6
VALID, BACK = "search[dress]<|end|>", "click[back to search]<|end|>"  # each is possible after the other
IMPOSSIBLE, UNREADABLE = "click[red]<|end|>", "red<|end|>"
TWO = replace(ALLOWANCE, max_turns=NUM_TURNS, max_invalid_turns=2)


def writes(*turns: str) -> Sampler:
    return engine_of(saying(shop_tokenizer(), *turns))


@pytest.mark.parametrize(
    ("turns", "most", "num_turns", "stop_reason"),
    [
        ([IMPOSSIBLE] * NUM_TURNS, 0, NUM_TURNS, StopReason.MAX_TURNS),
        ([IMPOSSIBLE], 1, 1, StopReason.MAX_INVALID_TURNS),
        ([VALID, IMPOSSIBLE, IMPOSSIBLE], 2, 3, StopReason.MAX_INVALID_TURNS),
        ([UNREADABLE, IMPOSSIBLE], 2, 2, StopReason.MAX_INVALID_TURNS),
        ([IMPOSSIBLE, VALID, IMPOSSIBLE, BACK, IMPOSSIBLE, VALID], 2, NUM_TURNS, StopReason.MAX_TURNS),
        ([IMPOSSIBLE] * NUM_TURNS, NUM_TURNS, NUM_TURNS, StopReason.MAX_TURNS),
        ([IMPOSSIBLE] * NUM_TURNS, 100, NUM_TURNS, StopReason.MAX_TURNS),
    ],
)
def test_invalid_turns_in_a_row_end_it(turns: list[str], most: int, num_turns: int, stop_reason: StopReason) -> None:
    trajectory = play(ShopEnv(), writes(*turns), allowance=replace(TWO, max_invalid_turns=most))
    check(trajectory, vocab_size=len(shop_tokenizer()))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (stop_reason, num_turns)
    assert trajectory.outcome is Outcome.POLICY  # it is trained, as a failure
    assert not trajectory.success
    if stop_reason is StopReason.MAX_INVALID_TURNS:
        assert trajectory.num_tokens == trajectory.turns[-1].stop  # the answer to the last turn is not kept


@pytest.mark.parametrize("written_before", [1, 2])
def test_a_preempted_episode_ends_at_the_same_turn_elsewhere(written_before: int) -> None:
    async def resumed() -> Trajectory:
        record = EpisodeRecord(attempt=attempt_on())
        cut = replace(TWO, max_turns=written_before)
        await rollout_of(ShopEnv(), writes(*[VALID, IMPOSSIBLE][:written_before]), record=record, allowance=cut)
        rest = [VALID, IMPOSSIBLE, IMPOSSIBLE][written_before:]
        elsewhere = resumed_record(attempt_on(), record.partial())
        return await rollout_of(ShopEnv(), writes(*rest), record=elsewhere, allowance=TWO)

    trajectory = asyncio.run(resumed())
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_INVALID_TURNS, 3)


def test_the_turns_that_an_attempt_has_from_its_sibling_count() -> None:
    parent = play(ShopEnv(), writes(VALID, IMPOSSIBLE, BACK, IMPOSSIBLE, IMPOSSIBLE), allowance=TWO)
    record = forked_record(attempt_on(), parent, Fork(parent=0, num_turns=2))
    sibling = asyncio.run(rollout_of(ShopEnv(), writes(IMPOSSIBLE), record=record, allowance=TWO))
    assert (sibling.stop_reason, len(sibling.turns)) == (StopReason.MAX_INVALID_TURNS, 3)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_peers_end_where_the_actors_do(most: int) -> None:
    config = load_config("conf/quickstart.yaml", [f"env.max_invalid_turns={most}", f"env.max_turns={NUM_TURNS}"])
    turns = [VALID, IMPOSSIBLE, BACK, UNREADABLE, IMPOSSIBLE, VALID]
    trajectory = play(ShopEnv(), writes(*turns), allowance=replace(TWO, max_invalid_turns=most))
    episode = Episode(trajectory.task, config, shop_tokenizer())
    for turn in trajectory.turns:
        assert not episode.done
        episode.answer([int(token) for token in trajectory.token_array()[turn.start : turn.stop]])
    assert episode.done and episode.tokens == trajectory.token_array().tolist()


def test_an_environment_that_plays_its_episodes_itself_is_refused() -> None:
    config = load_config(None, ["env.name=agent", "env.options.agent=a:b", "env.max_invalid_turns=3"])
    with pytest.raises(ConfigError, match=r"`env\.max_invalid_turns` must be 0 for `env\.name` agent: it plays its"):
        check_template(config, shop_tokenizer())


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`env\.max_invalid_turns` must be >= 0, got -1; 0 is the default"):
        load_config(None, ["env.max_invalid_turns=-1"])
