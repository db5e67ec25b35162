"""Which environment a group is of: weights, and what is too hard or too easy for now."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.learner.supply import mixed_tasks
from slipstream.learner.supply.curriculum import FEWEST, WINDOW, Curriculum
from slipstream.learner.supply.mixed_tasks import KEPT, MixedTasks
from slipstream.learner.supply.task_order import task_index
from slipstream.replay.records.ticket import Group, Lease
from tests.replay.records.attempts import attempt_at, earning, ticket

PARTS = {"craft": MixtureEntry(weight=3), "easy": MixtureEntry(name="grid", options={"game": "bandit"})}


def mixture(**settings: float) -> EnvConfig:
    return EnvConfig(mixture=PARTS, **settings)  # type: ignore[arg-type]


def shares(curriculum: Curriculum, *, count: int = 4000) -> dict[str, float]:
    drawn = Counter(curriculum.choose(group_id).task.env for group_id in range(count))
    return {label: number / count for label, number in drawn.items()}


def played(label: str, *, success: bool) -> Group:
    """A finished group of one episode."""
    return finished(0, label=label, successes=[success])


def finished(index: int, *, successes: Sequence[bool], label: str = "craft", is_repeat: bool = False) -> Group:
    """A finished group of a task; a success earns 1, a failure 0."""
    task = Task(env=label, split="train", index=index)
    asked = msgspec.structs.replace(ticket(0, num_members=len(successes)), task=task, is_repeat=is_repeat)
    lease = Lease(ticket=asked, fence=1, missing=dict.fromkeys(range(len(successes)), 0), partials={}, ttl_s=60)
    episodes = [
        msgspec.structs.replace(earning(attempt_at(lease, member, run_id="r"), float(success)), success=success)
        for member, success in enumerate(successes)
    ]
    return Group(ticket=asked, num_uses=1, trajectories=episodes)


def test_one_environment_is_a_mixture_of_itself() -> None:
    config = EnvConfig(name="craft", options={"depth": 2})
    assert config.entries() == {"craft": MixtureEntry(name="craft", options={"depth": 2})}
    assert shares(Curriculum(config, seed=0), count=50) == {"craft": 1.0}


def test_mixture_entries_share_the_groups_by_weight_under_their_own_labels() -> None:
    assert [entry.name for entry in mixture().entries().values()] == ["craft", "grid"]
    found = shares(Curriculum(mixture(), seed=1))
    assert found == pytest.approx({"craft": 0.75, "easy": 0.25}, abs=0.03)


def test_the_same_seed_gives_the_same_tasks_and_no_task_is_repeated_before_all_are_visited() -> None:
    tasks = [Curriculum(mixture(), seed=4).choose(group_id).task for group_id in range(200)]
    assert tasks == [Curriculum(mixture(), seed=4).choose(group_id).task for group_id in range(200)]
    assert tasks != [Curriculum(mixture(), seed=5).choose(group_id).task for group_id in range(200)]
    assert len({task.task_id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("success", [True, False])
def test_an_environment_that_is_too_easy_or_too_hard_gets_less_weight_until_it_changes(success: bool) -> None:
    curriculum = Curriculum(mixture(min_success=0.1, max_success=0.9, aside_weight=0.2), seed=2)
    curriculum.observe([played("easy", success=success)] * (FEWEST - 1))
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}  # too few to say
    curriculum.observe([played("easy", success=success)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}
    assert shares(curriculum)["easy"] == pytest.approx(0.2 / 3.2, abs=0.02)
    curriculum.observe([played("easy", success=not success)] * (WINDOW // 2))
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}


def test_unless_it_is_asked_for_nothing_is_set_aside() -> None:
    curriculum = Curriculum(mixture(), seed=2)
    curriculum.observe([*[played("easy", success=True)] * WINDOW, *[played("craft", success=False)] * WINDOW])
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}


def test_groups_of_a_part_that_is_no_longer_in_the_mixture_are_let_pass() -> None:
    curriculum = Curriculum(mixture(), seed=2)
    curriculum.observe([played("gone", success=True)])
    assert set(curriculum.weights()) == set(PARTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixture": {"a-b": MixtureEntry()}}, "letters, digits"),
        ({"mixture": {"a": MixtureEntry(weight=0)}}, r"env\.mixture\.a\.weight"),
        ({"min_success": 0.9, "max_success": 0.1}, r"env\.min_success"),
        ({"aside_weight": 0.0}, r"env\.aside_weight"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(**settings)  # type: ignore[arg-type]


MIXED, EQUAL = [True, False], [True, True]


def repeating(repeat: float = 0.75) -> Curriculum:
    return Curriculum(EnvConfig(name="craft", num_train_tasks=1000, repeat=repeat), seed=3)


def test_a_share_of_the_groups_repeats_tasks_on_which_attempts_differed() -> None:
    curriculum = repeating()
    curriculum.observe([finished(index, successes=MIXED if index < 200 else EQUAL) for index in range(250)])
    choices = [curriculum.choose(group_id) for group_id in range(250)]
    repeated = [choice.task.index for choice in choices if choice.is_repeat]
    assert len(repeated) / 250 == pytest.approx(0.75, abs=0.1)
    assert len(set(repeated)) == len(repeated), "no task has two groups at a time"
    assert set(repeated) <= set(range(200)), "all attempts at the others were equal"
    new = [(group_id, choice.task.index) for group_id, choice in enumerate(choices) if not choice.is_repeat]
    assert all(index == task_index(group_id, 1000, 3) for group_id, index in new)


def test_without_a_known_task_every_group_is_of_a_new_one() -> None:
    curriculum = repeating()
    curriculum.observe([finished(index, successes=EQUAL) for index in range(10)])
    assert not any(curriculum.choose(group_id).is_repeat for group_id in range(50))


def test_a_repeated_task_is_repeated_again_only_if_its_attempts_differ_again() -> None:
    tasks = MixedTasks()
    tasks.observe(7, [0.0, 1.0])
    assert tasks.take(random.Random(0)) == 7
    assert tasks.take(random.Random(0)) is None
    tasks.observe(7, [0.0, 1.0])
    for equal in ([1.0, 1.0], [0.1] * 3, [0.1 + 0.2, 0.3]):  # their mean, or their sums, may differ by rounding
        tasks.observe(7, equal)
        assert tasks.take(random.Random(0)) is None


def test_a_task_is_drawn_in_proportion_to_the_variance_of_its_returns() -> None:
    """p (1 - p) by hand: 1 of 8 is 7/64, 4 of 8 is 16/64, so 7 to 16."""
    one, half = [1.0] + [0.0] * 7, [1.0] * 4 + [0.0] * 4
    drawn = Counter[int | None]()
    for seed in range(4000):
        tasks = MixedTasks()
        tasks.observe(1, one)
        tasks.observe(4, half)
        drawn[tasks.take(random.Random(seed))] += 1
    assert drawn[1] / 4000 == pytest.approx(7 / 23, abs=0.025)


def test_only_the_newest_tasks_are_kept() -> None:
    tasks = MixedTasks()
    for index in range(KEPT + 5):
        tasks.observe(index, [0.0, 1.0])
    assert list(tasks.to_dict()) == list(range(5, KEPT + 5))


def test_the_success_of_an_environment_is_that_of_new_tasks() -> None:
    curriculum = Curriculum(mixture(min_success=0.1, max_success=0.9, aside_weight=0.2, repeat=0.5), seed=2)
    curriculum.observe([finished(index, label="easy", successes=EQUAL) for index in range(FEWEST)])
    curriculum.observe([finished(index, label="easy", successes=MIXED, is_repeat=True) for index in range(WINDOW)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}, "it is solved, whatever its hardest tasks say"


def test_the_tasks_to_repeat_survive_a_restart(tmp_path: Path) -> None:
    before, after = repeating(), repeating()
    before.observe([finished(index, successes=MIXED) for index in range(20)])
    mixed_tasks.save(before.mixed_tasks(), tmp_path / "tasks.json")
    after.restore(mixed_tasks.load(tmp_path / "tasks.json"))
    assert [after.choose(group_id) for group_id in range(30)] == [before.choose(group_id) for group_id in range(30)]


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json", b'{"schema": 1, "xxh3": "0", "content": {}}'])
def test_a_damaged_file_of_tasks_costs_only_its_tasks(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tasks.json"
    assert mixed_tasks.load(path) == {}
    assert caplog.text == "", "a new run has no file yet"
    path.write_bytes(damage)
    assert mixed_tasks.load(path) == {}
    assert str(path) in caplog.text


def share_of_mixed_groups(repeat: float, *, num_tasks: int, spread: float, num_groups: int = 1000) -> float:
    """Of groups of 8, where each task has a chance of its own, from a Beta distribution that `spread` widens."""
    config = EnvConfig(name="craft", num_train_tasks=num_tasks, repeat=repeat)
    curriculum, dice, num_mixed = Curriculum(config, seed=1), random.Random(5), 0
    chances = [dice.betavariate(4 / spread, 1 / spread) for _ in range(num_tasks)]
    for group_id in range(num_groups):
        task, is_repeat, _ = curriculum.choose(group_id)
        successes = [dice.random() < chances[task.index] for _ in range(8)]
        curriculum.observe([finished(task.index, successes=successes, is_repeat=is_repeat)])
        num_mixed += 0 < sum(successes) < 8
    return num_mixed / num_groups


@pytest.mark.parametrize("num_tasks", [200, 100_000])
def test_repeats_pay_where_tasks_differ_in_difficulty_and_change_little_where_they_do_not(num_tasks: int) -> None:
    """Success is 80 % in both: of tasks that are mostly solved always or never, and of tasks that are all alike."""
    share = partial(share_of_mixed_groups, num_tasks=num_tasks)
    assert share(0.75, spread=10.0) > 2 * share(0.0, spread=10.0)
    assert share(0.75, spread=0.05) == pytest.approx(share(0.0, spread=0.05), abs=0.1)


def test_a_group_is_observed_at_its_first_use_only() -> None:
    curriculum = Curriculum(mixture(min_success=0.1, max_success=0.7, aside_weight=0.2, repeat=0.5), seed=2)
    equal = [finished(index, label="easy", successes=EQUAL) for index in range(FEWEST)]
    mixed = finished(99, label="easy", successes=MIXED)
    curriculum.observe([mixed, *equal])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}
    known = curriculum.mixed_tasks()
    assert known["easy"] == {99: 0.25}
    curriculum.observe([msgspec.structs.replace(mixed, num_uses=uses) for uses in range(2, 2 + WINDOW)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}, "later uses say nothing new of the environment"
    curriculum.observe([finished(99, label="easy", successes=EQUAL, is_repeat=True)])
    curriculum.observe([msgspec.structs.replace(mixed, num_uses=2)])
    assert curriculum.mixed_tasks()["easy"] == {}, "nor of the task, whose newest group had equal returns"


def test_a_choice_that_is_taken_back_leaves_its_task_known() -> None:
    curriculum = repeating()
    curriculum.observe([finished(index, successes=MIXED) for index in range(20)])
    known = curriculum.mixed_tasks()
    choices = [curriculum.choose(group_id) for group_id in range(20)]
    assert sum(choice.is_repeat for choice in choices) > 10 and curriculum.mixed_tasks() != known
    for choice in choices:
        curriculum.take_back(choice)
    assert curriculum.mixed_tasks() == known
