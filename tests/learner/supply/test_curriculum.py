"""Which environment a group is of: weights, and what is too hard or too easy for now."""

from collections import Counter

import msgspec
import pytest

from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.supply.curriculum import FEWEST, WINDOW, Curriculum
from slipstream.replay.records.ticket import Group
from tests.replay.records.attempts import group_earning, ticket

PARTS = {"craft": MixtureEntry(weight=3), "easy": MixtureEntry(name="grid", options={"game": "bandit"})}


def mixture(**settings: float) -> EnvConfig:
    return EnvConfig(mixture=PARTS, **settings)  # type: ignore[arg-type]


def shares(curriculum: Curriculum, *, count: int = 4000) -> dict[str, float]:
    drawn = Counter(curriculum.choose(group_id).env for group_id in range(count))
    return {label: number / count for label, number in drawn.items()}


def played(label: str, *, success: bool, fork: bool | None = None) -> Group:
    """A finished group of one episode, and of a `fork` of other success."""
    results = [success] if fork is None else [success, fork]
    asked = ticket(0, num_members=len(results), num_trees=len(results) - 1, env=label)
    return group_earning(*map(float, results), asked=asked)


def test_one_environment_is_a_mixture_of_itself() -> None:
    config = EnvConfig(name="craft", options={"depth": 2})
    assert config.entries() == {"craft": MixtureEntry(name="craft", options={"depth": 2})}
    assert shares(Curriculum(config, seed=0), count=50) == {"craft": 1.0}


def test_mixture_entries_share_the_groups_by_weight_under_their_own_labels() -> None:
    assert [entry.name for entry in mixture().entries().values()] == ["craft", "grid"]
    assert shares(Curriculum(mixture(), seed=1)) == pytest.approx({"craft": 0.75, "easy": 0.25}, abs=0.03)


def test_the_same_seed_gives_the_same_tasks_and_no_task_is_repeated_before_all_are_visited() -> None:
    tasks = [Curriculum(mixture(), seed=4).choose(group_id) for group_id in range(200)]
    assert tasks == [Curriculum(mixture(), seed=4).choose(group_id) for group_id in range(200)]
    assert tasks != [Curriculum(mixture(), seed=5).choose(group_id) for group_id in range(200)]
    assert len({task.task_id for task in tasks}) == len(tasks)


@pytest.mark.parametrize("success", [True, False])
def test_an_environment_that_is_too_easy_or_too_hard_gets_less_weight_until_it_changes(success: bool) -> None:
    curriculum = Curriculum(mixture(curriculum=True), seed=2)
    curriculum.observe([played("easy", success=success, fork=not success)] * (FEWEST - 1))
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}  # too few to say
    curriculum.observe([played("easy", success=success)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}
    assert shares(curriculum)["easy"] == pytest.approx(0.2 / 3.2, abs=0.02)
    curriculum.observe([played("easy", success=not success)] * (WINDOW // 2))
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}


def test_unless_it_is_asked_for_nothing_is_set_aside() -> None:
    """And groups of a part that is no longer in the mixture are let pass."""
    curriculum = Curriculum(mixture(), seed=2)
    curriculum.observe([*[played("easy", success=True)] * WINDOW, *[played("craft", success=False)] * WINDOW])
    curriculum.observe([played("gone", success=True)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 1.0}


@pytest.mark.parametrize(
    ("parts", "message"),
    [({"a-b": MixtureEntry()}, "letters, digits"), ({"a": MixtureEntry(weight=0)}, r"env\.mixture\.a\.weight")],
)
def test_a_mixture_that_makes_no_sense_is_refused(parts: dict[str, MixtureEntry], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(mixture=parts)


def test_a_group_is_observed_at_its_first_use_only() -> None:
    curriculum = Curriculum(mixture(curriculum=True), seed=2)
    failed = played("easy", success=False)
    curriculum.observe([failed, *[played("easy", success=True)] * (WINDOW - 1)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}
    curriculum.observe([msgspec.structs.replace(failed, num_uses=uses) for uses in range(2, 2 + WINDOW)])
    assert curriculum.weights() == {"craft": 3.0, "easy": 0.2}, "later uses say nothing new of the environment"
