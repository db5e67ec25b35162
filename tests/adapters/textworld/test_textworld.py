"""TextWorld's games, made, compiled and really played: `make test-adapters` installs TextWorld and runs it."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import textworld

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from tests.adapters.held import USUAL
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case, rollout

pytestmark = pytest.mark.filterwarnings("ignore")  # TextWorld's own

CHECKS = [
    *USUAL,
    contract.test_every_admissible_action_is_understood,
    contract.test_a_state_has_one_key_however_long_ago_it_was_reached,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two games of two rooms."""
    folder = tmp_path_factory.mktemp("games")
    for seed in (1, 2):
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = seed, 2, 3, 3
        options.path = str(folder / f"game{seed}.z8")
        textworld.make(options)
    return folder


@pytest.fixture
def case(folder: Path) -> Case:
    options = {"train": str(folder), "held_out": str(folder)}
    return Case("textworld", max_turns=20, noisy_success=0, share=0.01, options=options)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_textworld_keeps_the_contract(check: Callable[[Case], None], case: Case) -> None:
    check(case)


def test_its_own_plan_wins_every_game_and_the_score_rises_on_the_way(case: Case) -> None:
    env, texts = case.make(), set()
    for index in range(4):
        observations = asyncio.run(rollout(env, case, case.task("train", index), random.Random(0), noise=0))
        assert (observations[-1].terminated, observations[-1].success) == (True, True)
        assert sum(sum(observation.rewards.values()) for observation in observations) > 0
        assert all(observation.score == 0.0 for observation in observations[:-1])
        texts.add(observations[0].messages[0].content)
    assert len(texts) == 2  # by turns
    asyncio.run(env.close())


def test_a_command_that_makes_no_sense_is_not_done_and_case_and_space_are_free(case: Case) -> None:
    env = case.make()
    asyncio.run(env.reset(case.task("train", 0)))
    refused = asyncio.run(env.step("fly to the moon"))
    assert (refused.valid_action, refused.messages[0].content) == (False, "Nothing happens.")
    assert asyncio.run(env.step("  LOOK ")).valid_action
    asyncio.run(env.close())


def test_what_is_missing_is_said_with_what_to_fetch(folder: Path, tmp_path: Path) -> None:
    for options, why in (
        ({}, "`env.options.train` must be set; give a folder of games"),
        ({"train": str(tmp_path)}, "contains no games; give a folder of games"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("textworld", options)
    (tmp_path / "alone.z8").write_bytes((folder / "game1.z8").read_bytes())
    alone = tmp_path.rename(tmp_path.with_name("alone"))  # a folder is read once in a process
    with pytest.raises(ValueError, match=r"needs the alone\.json"):
        make_env("textworld", {"train": str(alone)})
    with pytest.raises(ValueError, match="there are no held_out tasks"):
        asyncio.run(make_env("textworld", {"train": str(folder)}).reset(Task(env="t", split="held_out", index=0)))
