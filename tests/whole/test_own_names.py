"""Files of the user's may have any name, those of our rooms included, in the folder in which `slipstream` is called."""

from pathlib import Path

import pytest

from tests.processes import CLI, GUESS, python

NOT_OURS = "raise RuntimeError('this is not what was meant')\n"
FILES = {
    "tools.py": """
def search(text):
    return text.upper()


def patience(episode):
    return 0.25
""",
    "common/__init__.py": "GREETING = 'hello'\n",
    "learner.py": NOT_OURS,
    "actors.py": NOT_OURS,
    "replay.py": NOT_OURS,
    "envhub/__init__.py": NOT_OURS,
    "conf/mine.yaml": "env: {name: 'my_env:MyEnv'}\n",
    "my_env.py": """
from common import GREETING
from slipstream import Message, Observation
from tools import search


class MyEnv:
    replay_only = True

    async def reset(self, task):
        return Observation(messages=(Message("user", search(GREETING)),), rewards={})

    async def step(self, action):
        odd = len(action) % 2
        return Observation(
            messages=(), rewards={"odd": float(odd)}, terminated=True, valid_action=True, score=odd, success=odd == 1
        )

    async def close(self): ...
    def snapshot(self): raise NotImplementedError
    def restore(self, state): raise NotImplementedError
    def admissible(self): return None
    def state_key(self): return ""
    def expert(self): return "odd"
""",
}
ONE_STEP = [setting for setting in GUESS if not setting.startswith("env.name")]
ONE_STEP += ["run.name=mine", "replay.groups_per_step=2", "replay.group_size=2", "replay.drop_zero_variance=false"]
PATIENCE = "env.rewards={patience: {part: 'tools:patience', weight: 0.5}}"
ONE_STEP += [PATIENCE, "learner.steps=1", "actors.count=1", "warm_start.episodes=4"]


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)


@pytest.fixture(autouse=True)
def _no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs import what they find, not what a process of tests/preload.py has imported."""
    monkeypatch.setattr("tests.preload.PYTHON", "")


def test_a_run_in_a_folder_with_names_of_ours_is_checked_with_the_users_files(tmp_path: Path) -> None:
    write_files(tmp_path)
    check = ["-P", *CLI, "up", "--dry-run", "conf/mine.yaml", *ONE_STEP]
    done = python(*check, cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "tools.py").write_text(NOT_OURS)
    done = python(*check, cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 2 and "this is not what was meant" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("python_path", ["", "."])
def test_a_run_in_a_folder_with_names_of_ours_plays_with_the_users_files(tmp_path: Path, python_path: str) -> None:
    write_files(tmp_path)
    done = python("-P", *CLI, "up", "conf/mine.yaml", *ONE_STEP, cwd=tmp_path, PYTHONPATH=python_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "mine" / "trained_model" / "config.json").exists()
