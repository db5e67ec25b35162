"""Expert episodes for the warm start: made by the actors' own rollout, the same from the same seed."""

import logging
from pathlib import Path

import pytest

from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import Config, load_config
from slipstream.common.records import frame_file
from slipstream.common.records.trajectory import StopReason, Trajectory, check
from slipstream.learner.batch.pack import sequences_of
from slipstream.tools.run.prepare import demonstrate, prepare
from tests.actors.episode.episodes import timeless
from tests.common.text.small_tokenizer import shop_tokenizer


def config(*overrides: str) -> Config:
    return load_config(None, ["env.max_turns=8", "model.max_tokens=256", "warm_start.episodes=20", *overrides])


def demonstrations(*overrides: str) -> list[Trajectory]:
    return list(demonstrate(config(*overrides), shop_tokenizer()))


def actions(trajectory: Trajectory) -> list[str]:
    return [shop_tokenizer().decode(trajectory.token_array()[turn.start : turn.stop]) for turn in trajectory.turns]


def test_an_expert_without_noise_always_succeeds_and_its_actions_are_what_is_imitated() -> None:
    tokenizer = shop_tokenizer()
    for trajectory in demonstrations():
        check(trajectory, vocab_size=len(tokenizer))
        assert trajectory.success
        assert [turn.rewards for turn in trajectory.turns] == [{"purchase": 0.0}] * 4 + [{"purchase": 1.0}]
        (sequence,) = sequences_of(trajectory, advantage=0.0)
        imitated = tokenizer.decode(sequence.tokens[sequence.loss_mask])
        assert imitated == " ".join(actions(trajectory))
        assert imitated.count("<|end|>") == 5
    clicks = [f"click [ {word} ] <|end|>" for word in ("plain dress 10", "red", "small", "buy now")]
    assert actions(demonstrations()[0]) == ["search [ plain dress ] <|end|>", *clicks]


def test_noise_makes_some_episodes_fail_the_same_from_the_same_seed_and_is_imitated_like_the_rest() -> None:
    noisy = demonstrations("warm_start.noise=0.3")
    assert 0 < sum(trajectory.success for trajectory in noisy) < 20
    assert {trajectory.stop_reason for trajectory in noisy} <= {StopReason.DONE, StopReason.MAX_TURNS}
    assert all(turn.valid_action for trajectory in noisy for turn in trajectory.turns)
    again = demonstrations("warm_start.noise=0.3")
    assert [timeless(trajectory) for trajectory in again] == [timeless(trajectory) for trajectory in noisy]
    other = demonstrations("warm_start.noise=0.3", "run.seed=1")
    assert [actions(trajectory) for trajectory in other] != [actions(trajectory) for trajectory in noisy]


def test_where_there_are_fewer_tasks_than_episodes_they_come_again_with_other_noise() -> None:
    few = demonstrations("env.num_train_tasks=3", "warm_start.noise=0.5")
    assert [trajectory.task.index for trajectory in few] == [number % 3 for number in range(20)]
    assert len({tuple(actions(trajectory)) for trajectory in few if trajectory.task.index == 0}) > 1


def test_tasks_that_do_not_work_are_left_out_and_named_while_they_are_few(caplog: pytest.LogCaptureFixture) -> None:
    patchy = "env.name=tests.envhub.failing:PatchyEnv"
    with caplog.at_level(logging.WARNING):
        played = demonstrations(patchy, "env.options.every=5")
    assert [trajectory.task.index for trajectory in played] == [number for number in range(20) if number % 5]
    assert "/train/10 is left out, its expert failed to play: task 10 does not work" in caplog.text
    with pytest.raises(EpisodeFailed, match="task 15 does not work"):
        demonstrations(patchy, "env.options.every=3")


def test_prepare_makes_a_run_directory_whole_and_leaves_what_is_there(tmp_path: Path) -> None:
    settings = config(f"run.root={tmp_path}", "run.name=made", "model.tiny_depth=1")
    run_dir = prepare(settings)
    read = list(frame_file.read(run_dir.demonstrations, vocab_size=len(shop_tokenizer())))
    assert [trajectory.group_id for trajectory in read] == list(range(20))
    assert load_config(str(run_dir.config), []) == settings
    written = {path: path.stat().st_mtime_ns for path in (run_dir.demonstrations, run_dir.model / "config.json")}
    prepare(settings)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert not list(run_dir.path.glob("*.tmp"))
