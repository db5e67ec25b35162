"""`slipstream replay diff`: what a step was trained on, in the terms in which a collapse of rewards shows."""

import pytest

from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.versions import Resumption
from slipstream.replay.records.ticket import Group
from tests.common.text.small_tokenizer import END
from tests.tools.replay.inspected import Inspected


def claim(inspected: Inspected, step: int, num_groups: int) -> list[Group]:
    groups = inspected.buffer.learner.claim(step, num_groups, policy_version=4, max_lag=9)
    assert len(groups) == num_groups
    return groups


def archive(inspected: Inspected, step: int, groups: list[Group], *, policy_version: int) -> None:
    inspected.archive(step, groups, policy_version=policy_version)
    inspected.buffer.learner.settle(step)


def test_a_step_is_shown_with_returns_signs_of_advantages_and_how_the_best_differs(inspected: Inspected) -> None:
    inspected.open(1, 2, num_members=3)
    inspected.fill(lambda member: "look" if member == 1 else "guess", rewards=(0.0, 1.0, 0.5), policy_version=2)
    inspected.fill(rewards=(0.5, 0.5, 0.5), policy_version=3)
    archive(inspected, 6, claim(inspected, 6, 2), policy_version=5)
    step, unequal, equal = inspected.json("diff", "6")
    assert step["num_groups"] == 2 and step["num_trajectories"] == 6 and step["policy_version"] == 5
    assert [step[name] for name in ("trained_reward", "equal_groups", "lag_max", "lag_mean")] == [0.5, 1, 3, 2.5]
    assert step["valid_actions"] == 1.0 and step["cut_by_length"] == 0.0 and step["logprob_mean"] == -0.5
    assert unequal["returns"] == [0.0, 1.0, 0.5] and unequal["advantages"] == "-+0" and unequal["lag"] == 3
    assert (unequal["best"], unequal["worst"]) == (1, 0)
    assert unequal["diff"][1:3] == [f"-turn 0: guess{END}", f"+turn 0: look{END}"]
    assert equal["advantages"] == "000"

    said = inspected("diff", "6", "--diffs", "1")
    assert "trained_reward: 0.500" in said and "group 1: from member 0 (-) to member 1 (+)" in said
    assert f"  +turn 0: look{END}" in said.splitlines() and "group 2: from" not in said


def test_lag_leaves_out_the_versions_that_a_learner_skipped_when_it_came_back(inspected: Inspected) -> None:
    inspected.filled(1, policy_version=4)
    (group,) = claim(inspected, 6, 1)
    came_back = Resumption(checkpoint_version=5, first_version=9)
    inspected.archive(6, [group], policy_version=9, resumptions=(came_back,))
    inspected.buffer.learner.settle(6)
    assert inspected.json("diff", "6")[0]["lag_max"] == 1


def test_two_steps_are_compared_and_the_tasks_of_both_are_named(inspected: Inspected) -> None:
    inspected.filled(1, 2)
    first = claim(inspected, 1, 1)
    archive(inspected, 1, first, policy_version=4)
    inspected.fill(rewards=(0.25, 0.25), policy_version=3)
    archive(inspected, 2, claim(inspected, 2, 1), policy_version=5)
    archive(inspected, 3, first, policy_version=8)
    said = inspected("diff", "1", "2")
    mean = next(line for line in said.splitlines() if line.startswith("trained_reward"))
    assert mean.split() == ["trained_reward", "0.500", "0.250", "-0.250"]
    assert "0 tasks are in both" in said
    assert "shop/train/1: mean return 0.500, then 0.500" in inspected("diff", "1", "3")
    one, three, shared = inspected.json("diff", "1", "3")
    assert (one["lag_max"], three["lag_max"]) == (0, 4)
    assert shared == {"task": "shop/train/1", "mean_return": 0.5, "other_return": 0.5}


def test_a_claimed_step_that_is_not_archived_is_read_from_redis(inspected: Inspected) -> None:
    inspected.filled(1)
    claim(inspected, 3, 1)
    step, group = inspected.json("diff", "3")
    assert step["policy_version"] is None and group["lag"] is None and group["returns"] == [0.0, 1.0]
    assert "lag_mean: unknown" in inspected("diff", "3")


def test_a_step_that_is_not_recorded_is_answered_with_the_archived_steps(inspected: Inspected) -> None:
    complaint = inspected("diff", "9", code=2)
    assert f"step 9 of {inspected.run_id} is not recorded: it is not in Redis, and the archive" in complaint
    assert "trajectories is empty" in complaint
    inspected.filled(1)
    archive(inspected, 4, claim(inspected, 4, 1), policy_version=4)
    assert "trajectories has steps 4 to 4" in inspected("diff", "9", code=2)


def test_a_trained_group_is_shown_from_the_archive_also_without_a_server(inspected: Inspected) -> None:
    inspected.filled(1)
    archive(inspected, 4, claim(inspected, 4, 1), policy_version=4)
    assert inspected.buffer.learner.ledger().trained == 1
    assert "group 1, member 1, attempt 0, archived, claimed for step 4" in inspected("show", "1", "1")
    model = f"model.path={inspected.root / 'model'}"
    said = inspected("show", "1", "1", "redis.url=redis://127.0.0.1:1", model)
    assert "group 1, member 1, attempt 0, archived, claimed for step 4" in said
    complaint = inspected("show", "7", "redis.url=redis://127.0.0.1:1", model, code=2)
    assert "group 7 is not in the train stream" in complaint and "no server answers" in complaint


def test_hostile_actions_are_escaped_in_a_diff_too(inspected: Inspected) -> None:
    inspected.filled(1, words=lambda member: f"\x1b[2J[red]{member}\u202e")
    claim(inspected, 1, 1)
    said = inspected("diff", "1")
    assert rf"-turn 0: \x1b[2J[red]0\u202e{END}" in said
    assert not [character for character in said if not character.isprintable() and character != "\n"]


@pytest.mark.parametrize("size", [0, 40])
def test_a_damaged_archive_is_named(inspected: Inspected, size: int) -> None:
    inspected.filled(1)
    archive(inspected, 4, claim(inspected, 4, 1), policy_version=4)
    [path] = RunDir(inspected.root, inspected.run_id).trajectories.iterdir()
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in inspected("diff", "4", code=2)
