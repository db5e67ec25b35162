"""The user's code is compared, module by module, between the learner's host and the actors'."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from slipstream.actors.host.host_parts import check_environments
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import code_of
from slipstream.envhub.own_modules import SHARED_ROOMS, SLIPSTREAM, own_modules
from tests.replay.buffer.every_verb import FACTS

ENV = """
from tests.guess import GuessEnv
from ours.words import WORDS

class OurEnv(GuessEnv):
    pass
"""
REWARD = """
def exact(completions, **columns):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the user's: an environment, what it imports, a reward, and a script that nothing imports."""
    package = tmp_path / "ours"
    package.mkdir()
    for name, text in (("env", ENV), ("words", "WORDS = ()"), ("rewards", REWARD), ("script", ""), ("__init__", "")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "ours"]:
        del sys.modules[name]


def test_the_modules_are_those_of_the_package_that_the_environment_imports(package: Path) -> None:
    config = load_config(None, ["env.name=ours.env:OurEnv"])
    assert set(own_modules(config.env)) == {SLIPSTREAM, "ours", "ours.env", "ours.words"}
    assert set(own_modules(load_config(None, ["env.name=shop"]).env)) == {SLIPSTREAM}


def test_a_function_that_is_a_part_of_the_reward_counts_too(package: Path) -> None:
    config = load_config(None, ["env.name=grid", "env.rewards={right: {part: 'ours.rewards:exact'}}"])
    assert set(own_modules(config.env)) == {SLIPSTREAM, "ours", "ours.rewards"}


def test_an_actor_with_other_code_is_refused_by_the_name_of_the_module_and_its_file(package: Path) -> None:
    config = load_config(None, ["env.name=ours.env:OurEnv"])
    facts = replace(FACTS, own_modules=own_modules(config.env))
    check_environments(config, facts)
    (package / "script.py").write_text("changed")
    check_environments(config, facts)
    (package / "words.py").write_text("WORDS = ('changed',)")
    with pytest.raises(ConfigError, match=r"the module ours\.words on this host, .*ours/words\.py, differs"):
        check_environments(config, facts)


def test_an_actor_of_another_version_is_refused() -> None:
    """Its scripts for Redis, its records and its environments may be others, under the same names."""
    config = load_config(None, ["env.name=shop"])
    with pytest.raises(ConfigError, match=r"Slipstream on this host differs .* the learner's 0123; install"):
        check_environments(config, replace(FACTS, own_modules={SLIPSTREAM: "0123"}))


def test_the_digest_is_of_every_python_file_and_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tmp_path / "common" / "process" / "imported.py", tmp_path / "replay" / "lua" / "lease.lua"]
    for file in found:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first")
    monkeypatch.setattr("slipstream.common.process.imported.__file__", str(found[0]))
    digests = [code_of(SHARED_ROOMS)]
    for file in found:
        file.write_text("changed")
        digests.append(code_of(SHARED_ROOMS))
    (tmp_path / "replay" / "notes.txt").write_text("no code")
    assert code_of(SHARED_ROOMS) == digests[-1]
    assert len(set(digests)) == 3


def test_an_actor_without_the_code_learns_where_it_must_be() -> None:
    config = load_config(None, ["env.name=theirs.env:TheirEnv"])
    with pytest.raises(ConfigError, match=r"cannot import theirs.* must be on every host of actors: in its image"):
        check_environments(config, replace(FACTS, own_modules={"theirs.env": "digest"}))
