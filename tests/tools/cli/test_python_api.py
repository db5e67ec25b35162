"""`slipstream.train`: what a script or a notebook defines reaches the processes of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.cli.python_api import definitions
from tests.processes import DEADLINE_S, GUESS

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import slipstream
from tests.guess import GuessEnv

WORTH = 0.25


def worth(completions):
    return WORTH * len(completions)


def short(completions, **columns):
    return [worth(text.split()[:1]) for text in completions]


class Mine(GuessEnv):
    def __init__(self):
        super().__init__(turns=2)


run = slipstream.train(env=Mine, reward=short, steps=2, name="mine", **SETTINGS)
assert run.success is not None and 0 <= run.success <= 1
assert (run.model_path / "config.json").is_file() and run.report().is_file()
print("made:", (run.path / "from_main.py").read_text())
"""
NOTEBOOK = """
from __future__ import annotations
import math, sys
from pathlib import Path
size = 2
size = 3
def area(): return math.pi * size
class Env:
    folder: Path
    def step(self): return area()
run = slipstream.train(env=Env)
"""


def test_a_module_has_what_a_definition_needs_and_nothing_that_starts_a_run() -> None:
    made = definitions(NOTEBOOK, ["Env"])
    assert made.startswith(
        "from __future__ import annotations\n\nimport math, sys\n\nfrom pathlib import Path\n\nsize = 3"
    )
    assert "def area" in made and "train" not in made and "size = 2" not in made
    assert definitions(NOTEBOOK, ["area"]).count("class") == 0
    with pytest.raises(ConfigError, match="Other is not defined at the top of the script or of a cell"):
        definitions(NOTEBOOK, ["Other"])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"env": lambda: None}, "cannot be imported by other processes; give a class or function from the top"),
        ({"optim.lrr": 1}, "unknown config key `optim.lrr`; did you mean `optim.lr`?"),
        ({"learning_rate": 1}, "did you mean `optim.lr`?"),
        ({"config": "conf/nowhere.yaml"}, "no config file at conf/nowhere.yaml"),
        ({"name": "one"}, "run 'one' exists in "),
    ],
)
def test_a_mistake_is_refused_before_any_writing(given: dict[str, object], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=complaint):
        slipstream.train(**{"run.root": str(tmp_path)}, **given)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_script_trains_on_the_environment_and_the_reward_that_it_defines(tmp_path: Path) -> None:
    settings = dict(setting.split("=", 1) for setting in GUESS if not setting.startswith("env.name"))
    settings |= {"run.root": str(tmp_path), "eval.num_tasks": "4", "warm_start.episodes": "4", "actors.count": "1"}
    settings |= {"replay.groups_per_step": "2", "replay.drop_zero_variance": "false"}
    (tmp_path / "script.py").write_text(SCRIPT.replace("SETTINGS", repr(settings)))
    python_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-u", str(tmp_path / "script.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step    2" in done.stdout and "held-out success" in done.stdout
    assert "WORTH = 0.25" in done.stdout and "slipstream.train(" not in done.stdout
