"""A search by snapshots and a search by replays find the same episodes, in every environment that has snapshots."""

import asyncio
import random
from pathlib import Path

import pytest

from slipstream.actors.episode.actions import ADMISSIBLE
from slipstream.actors.search.episode_tree import Collected
from slipstream.actors.search.tree_search import tree_of_thoughts
from slipstream.common.config.config import Config
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.envhub.world import WorldEnv
from tests.actors.episode.episodes import Script, ids
from tests.common.text.small_tokenizer import END
from tests.envhub.env_cases import CASES, Case
from tests.tools.play.test_collect import SHOP, TOKENIZER, settings, told, tree_on, wavering

ONE_OF_EACH = {case.name: case for case in reversed(CASES)}


def any_action(case: Case) -> Script:
    """Writes one of the actions that the prompt lists, or of the case's samples."""

    def write(tokens: list[int], seed: int | None) -> list[int]:
        listed = str(TOKENIZER.decode(tokens)).rpartition(f"{ADMISSIBLE} ")[2].split(END)[0].split("; ")
        lasting = [action for action in listed if action != "done"]  # which ends an episode of `web`
        return ids(TOKENIZER, random.Random(seed).choice(case.samples or lasting) + END)

    return write


def search(config: Config, script: Script, folder: Path, *, width: int = 3, beam: int = 2) -> Collected:
    tree, collected = tree_on(config, script, folder)
    asyncio.run(tree_of_thoughts(tree, width=width, beam=beam))
    return collected


def ends_of(found: Collected) -> list[tuple[object, ...]]:
    """The episodes with the state of their last turn, by member: those that ran at a time end in any order."""
    episodes = sorted(found.trajectories, key=lambda each: each.member)
    return [(told(each), each.turns[-1].state_key) for each in episodes]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actions that any environment of ours received."""
    received, step = list[str](), WorldEnv.step

    async def counted(env: WorldEnv, action: str) -> Observation:
        received.append(action)
        return await step(env, action)

    monkeypatch.setattr(WorldEnv, "step", counted)
    return received


@pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=str)
def test_snapshots_equal_replays(case: Case, tmp_path: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"env.options.{name}={value}" for name, value in case.options.items()]
    sizes = ["model.max_tokens=65536", "learner.micro_batch_tokens=65536", "sampling.max_turn_tokens=512"]
    shown = ["env.max_turns=3", f"env.show_admissible={not case.samples}"]
    config = settings(f"env.name={case.name}", *options, *shown, *sizes)
    shape = {"width": 2, "beam": 1} if case.max_walk < 10 else {}  # in a sandbox, whose commands take long
    restored = search(config, any_action(case), tmp_path, **shape)
    assert len(steps) == restored.num_turns  # a turn costs one step, however deep it is
    monkeypatch.setattr(WorldEnv, "replay_only", True)
    steps.clear()
    replayed = search(config, any_action(case), tmp_path, **shape)
    assert len(steps) > replayed.num_turns
    assert ends_of(replayed) == ends_of(restored)
    assert (restored.num_failed, replayed.num_failed) == (0, 0) and restored.trajectories


@pytest.mark.parametrize("fault", ["raises", "is of another state"])
def test_a_snapshot_that_cannot_be_used_fails_the_branch_and_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restore = ShopEnv.restore

    def broken(env: ShopEnv, state: bytes) -> Observation:
        if fault == "raises":
            raise EnvError("the disk is full")
        restore(env, state)
        env.state_key = lambda: "another"  # type: ignore[method-assign]
        return restore(env, state)

    monkeypatch.setattr(ShopEnv, "restore", broken)
    config = settings(*SHOP)
    found = search(config, wavering(config, right=1.0), tmp_path, width=1)
    assert found.trajectories == [] and found.num_failed == 1
    expected = {"raises": "the disk is full", "is of another state": "restored to another state"}[fault]
    assert expected in caplog.text
