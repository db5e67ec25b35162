"""Every command, option and key of docs/openmanus.md is parsed, loaded and checked, without an engine."""

import re
from inspect import signature
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.common.config.config import dump_config, load_config
from slipstream.envhub.catalogue import ASSETS, ENVS, REMOTE
from slipstream.envhub.dataset.checks import CHECKS
from slipstream.envhub.dataset.dataset import make_dataset_env
from slipstream.envhub.remote.agentgym_client import AgentGymClient
from slipstream.envhub.rewards.part import parts_of
from slipstream.learner.objective.coherence import check_coherence
from slipstream.tools.cli.cli import load, parsed
from slipstream.tools.cli.verb_table import called
from slipstream.tools.run.check_input import check_env
from tests.learner.objective.objectives import check_objective

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "docs" / "openmanus.md").read_text()
OURS = [
    cells[2]
    for line in TEXT.splitlines()
    if (cells := line.split("|")) and line.startswith("| ") and cells[1].strip() not in ("theirs", "promise")
]
SPANS = [re.findall(r"`([^`]*)`", cell) for cell in OURS]
SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)+=\S+")
WHOLE = [
    command.replace("\\\n", " ")
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for command in re.split(r"\n(?=\S)", block.strip())
]
COMMANDS = [*WHOLE, *(span for spans in SPANS for span in spans if span.startswith("slipstream "))]
SETTINGS = list(
    dict.fromkeys(" ".join(found) for spans in SPANS if (found := [span for span in spans if SETTING.fullmatch(span)]))
)
# What a setting needs beside it, which its row does not repeat.
BESIDE = {
    "objective.critic_warmup_steps=10": "objective.critic=own objective.advantage=gae",
    "objective.kl_place=reward": "objective.critic=own objective.advantage=gae",
    "env.rewards.long.weight=-0.1": "env.rewards.long.part=length env.rewards.long.budget_tokens=200",
    "env.name=dataset": "env.max_turns=1",
    "model.max_tokens=4096": "learner.micro_batch_tokens=4096",
    "model.max_tokens=4608": "learner.micro_batch_tokens=4608",
    "sampling.max_turn_tokens=512": "model.max_tokens=2048 learner.micro_batch_tokens=4608",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with `conf`, the run `demo`, rows, and a reward function of TRL's signature."""
    (tmp_path / "conf").symlink_to(REPOSITORY / "conf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    config = load_config(str(REPOSITORY / "conf" / "quickstart.yaml"), ["run.name=demo"])
    (tmp_path / "runs" / "demo" / "config.yaml").write_text(dump_config(config))
    rows = [{"prompt": f"{number} + 1?", "solution": f"${number + 1}$"} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "my_grpo.py").write_text("def tag_count_reward(completions, **kwargs):\n    return [0.5]\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_every_row_names_something_of_ours_or_says_that_it_is_always_so() -> None:
    assert len(OURS) > 65 and len(WHOLE) == 2 and len(COMMANDS) > 28
    known = ("slipstream ", "env.rewards")
    assert [span for spans in SPANS for span in spans if not (span.startswith(known) or SETTING.fullmatch(span))] == []
    bare = [cell for cell in OURS if "`" not in cell and "theirs" not in cell]
    assert [cell for cell in bare if not cell.strip().startswith("always")] == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_parsed_and_its_configuration_accepted(command: str) -> None:
    arguments = parsed(command.split()[1:])
    config = load(arguments)
    called(arguments)  # with the verb's own options
    if arguments.verb == "up":
        check_objective(config)
        check_env(config.env)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_of_every_row_are_accepted_together(settings: str) -> None:
    given = settings.split()
    config = load_config(None, [each for name in given for each in [*BESIDE.get(name, "").split(), name]])
    check_coherence(config)
    assert parts_of("env.rewards", config.env.rewards) or not config.env.rewards
    assert config.env.name in ENVS | ASSETS | REMOTE
    options = {*signature(make_dataset_env).parameters, *signature(AgentGymClient).parameters}
    assert config.env.options.keys() <= options
    assert config.env.options.get("check", "exact") in CHECKS
