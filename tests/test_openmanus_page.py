"""Every verb, option and key that docs/openmanus.md puts beside a command of others exists and loads."""

import dataclasses
import re
from inspect import signature
from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.envhub.catalogue import ASSETS, ENVS, REMOTE
from slipstream.envhub.dataset.checks import CHECKS
from slipstream.envhub.dataset.dataset import make_dataset_env
from slipstream.envhub.remote.agentgym_client import AgentGymClient
from slipstream.envhub.rewards.part import parts_of
from slipstream.tools.cli.verb_table import VERBS

PAGE = Path(__file__).parents[1] / "docs" / "openmanus.md"
OURS = [
    cells[2]
    for line in PAGE.read_text().splitlines()
    if (cells := line.split("|")) and line.startswith("| ") and "theirs" not in cells[1]
]
SPANS = [span for cell in OURS for span in re.findall(r"`([^`]*)`", cell)]
SETTINGS = [span for span in SPANS if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", span)]
COMMANDS = [span.split() for span in SPANS if span.startswith("slipstream ")]


def test_every_row_names_something_of_ours_or_says_that_it_is_always_so() -> None:
    assert len(OURS) > 50
    known = {"env.rewards", *(" ".join(words) for words in COMMANDS), *SETTINGS}
    assert [span for span in SPANS if span not in known] == []
    assert [
        cell for cell in OURS if "`" not in cell and not cell.strip().startswith("always") and "theirs" not in cell
    ] == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_verb_and_option_exists(words: list[str]) -> None:
    verb = VERBS[words[1]] if words[1] in VERBS else VERBS[" ".join(words[1:3])]
    names = {field.name for field in dataclasses.fields(verb.own)} if verb.own else set()
    assert {word[2:].replace("-", "_") for word in words[2:] if word.startswith("--")} <= names


@pytest.mark.parametrize("setting", sorted(set(SETTINGS)))
def test_every_key_exists_and_takes_the_value(setting: str) -> None:
    together = {
        "objective.advantage=gae": ["objective.critic=own"],
        "objective.critic=own": ["objective.advantage=gae"],
        "objective.critic_warmup_steps=10": ["objective.critic=own", "objective.advantage=gae"],
        "objective.kl_place=reward": [
            "objective.kl_coefficient=0.01",
            "objective.advantage=gae",
            "objective.critic=own",
        ],
        "env.rewards.long.budget_tokens=200": ["env.rewards.long.part=length"],
        "env.rewards.long.weight=-0.1": ["env.rewards.long.part=length", "env.rewards.long.budget_tokens=200"],
        "env.rewards.long.part=length": ["env.rewards.long.budget_tokens=200"],
        "env.name=dataset": ["env.max_turns=1"],
        "model.max_tokens=4096": ["learner.micro_batch_tokens=4096"],
        "model.max_tokens=4608": ["learner.micro_batch_tokens=4608"],
        "sampling.max_turn_tokens=512": ["model.max_tokens=2048"],
        "env.rewards.invalid.weight=-0.1": ["env.rewards.invalid.part=invalid_actions"],
    }
    config = load_config(None, [setting, *together.get(setting, [])])
    key, _, value = setting.partition("=")
    if key == "env.name":
        assert value in ENVS | ASSETS | REMOTE
    if key.startswith("env.options."):
        assert key.rpartition(".")[2] in {
            *signature(make_dataset_env).parameters,
            *signature(AgentGymClient).parameters,
        }
    if key == "env.options.check":
        assert value in CHECKS
    if key.startswith("env.rewards."):
        assert parts_of("env.rewards", config.env.rewards)
