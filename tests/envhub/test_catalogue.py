"""The catalogue: environments by name, the user's own, and the errors for a wrong name or option."""

import asyncio
import inspect
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.records.trajectory import Task
from slipstream.envhub import catalogue
from slipstream.envhub.catalogue import ADAPTERS, ENVS, env_maker, make_any_env, make_env
from slipstream.envhub.env import Env
from tests.envhub.env_cases import Case, rollout
from tests.guess import GuessEnv

NO_CLASS: list[str] = []


class Unfinished:
    replay_only, reset = True, GuessEnv.reset


class Inheritor(Env):
    replay_only = True


class Plain:
    reset, step = GuessEnv.reset, GuessEnv.step


class Restorable(Plain):
    snapshot, restore = GuessEnv.snapshot, GuessEnv.restore


class Misspelt(Plain):
    replay_only, snapshot = False, GuessEnv.snapshot


class Wrapper:
    reset, step = Plain.reset, Plain.step

    def __getattr__(self, name: str) -> Any:
        return f"the inner {name}"


def test_the_environment_in_the_docs_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "counting.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("counting:CountingEnv", {"largest": 5})
    task = Task(env="counting:CountingEnv", split="train", index=3)
    case = Case(name="counting:CountingEnv", max_turns=20, noisy_success=1.0)
    end = asyncio.run(rollout(env, case, task, random.Random(0), noise=0))[-1]
    assert (end.success, end.rewards) == (True, {"counted": 1.0})


def test_the_environment_in_the_readme_runs_as_printed_with_the_defaults_of_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "counting.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counting", raising=False)
    env = make_env("counting:CountingEnv", {"largest": 1})
    asyncio.run(env.reset(Task(env="counting:CountingEnv", split="train", index=3)))
    assert (env.replay_only, env.admissible(), env.state_key()) == (True, None, "")
    assert not asyncio.run(env.step("up")).terminated
    assert asyncio.run(env.step("done")).success
    asyncio.run(env.close())
    for member in (env.expert, env.snapshot, lambda: env.restore(b"")):
        with pytest.raises(NotImplementedError):
            member()
    with pytest.raises(ValueError, match="got an unexpected keyword argument 'smallest'"):
        make_env("counting:CountingEnv", {"smallest": 1})


@pytest.mark.parametrize("name", [*ENVS, *ADAPTERS, *catalogue.ASSETS, *catalogue.REMOTE, *catalogue.DRIVING])
def test_an_option_of_another_type_is_named_whatever_the_environment(name: str) -> None:
    """As YAML makes them of words without quotes, of numbers with units, and of nothing."""
    options = inspect.signature(catalogue._maker(name)).parameters
    needed = {option: "x" for option, given in options.items() if given.default is given.empty}
    for option, given in options.items():
        kind, lists = given.annotation, str(given.annotation)
        wrong: tuple[object, ...] = (True, 5, None, ["x"], {1: "x"})
        if kind is int or option == "server_command":
            continue  # which has a range, and null starts none
        if kind is float:
            wrong = (True, "30s", 0, -1.0, float("nan"))
        elif "Sequence" in lists:
            wrong = (True, 5, {"x": 1}, [[1]])
        elif "Mapping" in lists:
            wrong = (True, 5, "x", ["x"], {1: "x"})
        for value in wrong:
            complaint = rf"`env\.options\.{option}` must be a .*, got {re.escape(repr(value))}"
            with pytest.raises(ValueError, match=complaint):
                make_any_env(name, {option: value, **{each: "x" for each in needed if each != option}})


def test_a_wrong_name_is_explained() -> None:
    for name, complaint in (
        ("shpo", "got 'shpo'; did you mean shop?"),
        ("chess", "or module:Class for your own environment, got 'chess'; check the spelling"),
        ("nowhere.maze:Maze", "cannot import nowhere.maze: No module named 'nowhere'; is its folder on PYTHONPATH?"),
        ("os; rm:Maze", "must be module:NAME, got 'os; rm:Maze'; write it as in my_envs.maze:MazeEnv"),
        ("module:", "must be module:NAME"),
        (f"{__name__}:Inheritr", "did you mean Inheritor?"),
        (f"{__name__}:NO_CLASS", "NO_CLASS must be a class, got list"),
        (f"{__name__}:Unfinished", "lacks step of slipstream.envhub.env.Env"),
        (f"{__name__}:Inheritor", "lacks reset, step of slipstream.envhub.env.Env"),
        (f"{__name__}:Misspelt", "lacks restore of slipstream.envhub.env.Env"),
    ):
        with pytest.raises(ValueError, match=f"`env.name`.*{re.escape(complaint)}"):
            env_maker(name)


def test_what_a_class_lacks_has_the_default_that_fits_the_rest_of_it() -> None:
    plain, restorable = (make_env(f"{__name__}:{kind.__name__}", {}) for kind in (Plain, Restorable))
    assert (plain.replay_only, restorable.replay_only) == (True, False)
    assert env_maker(f"{__name__}:Plain") is Plain, "one class for all episodes: a new one each would stay for ever"
    wrapper: Any = make_env(f"{__name__}:Wrapper", {})
    assert wrapper.expert == "the inner expert" and wrapper.replay_only == "the inner replay_only"


def test_invalid_options_are_explained() -> None:
    for name, options, complaint in (
        ("shop", {"profil": "small"}, "shop: got an unexpected keyword argument 'profil'; its options are: profile"),
        ("shop", {"profile": "tiny"}, "`env.options.profile` must be small or full, got 'tiny'"),
        ("household", {"profile": "tiny"}, "`env.options.profile` must be small or full, got 'tiny'"),
        ("grid", {"game": "chess"}, "`env.options.game` must be sokoban or frozen_lake or maze or bandit, got 'chess'"),
        ("grid", {"size": 4}, "`env.options.size` must be a whole number from 5 to 8, got 4"),
        ("grid", {"size": 5.5}, "`env.options.size` must be a whole number from 5 to 8, got 5.5"),
        ("household", {"task_types": ["dance"]}, "`env.options.task_types` must be some of pick_and_place, "),
        ("household", {"task_types": []}, "leave it out for all"),
        ("tests.envhub.failing:UnmadeEnv", {"length": 3}, "its options are: none"),
    ):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            make_env(name, options)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_without_its_package_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the packages of adapters only these two are pinned, for foreign scripts."""
    for package in ("gymnasium", "mcp"):
        monkeypatch.setitem(sys.modules, package, None)
    assert env_maker(name).__name__ == ADAPTERS[name].partition(":")[2]
    with pytest.raises(ValueError, match=r"needs the package \w+, which cannot be imported: .*; run `pip install '\w+"):
        make_env(name, {})
