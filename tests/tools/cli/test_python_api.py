"""`slipstream.train`: what a script or a notebook defines reaches the processes of a run."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import held
from slipstream.tools.cli import python_api
from slipstream.tools.cli.python_api import TrainedRun, definitions
from tests.processes import DEADLINE_S, GUESS, POLL_S, REPOSITORY, python
from tests.tools.see.test_runs import FINAL, SUMMARY

SCRIPT = """
import asyncio, contextlib, io
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


async def cell():
    return slipstream.train(env=Mine, reward=short, steps=2, name="mine", **SETTINGS)


with contextlib.redirect_stdout(io.StringIO()) as shown:
    run = asyncio.run(cell())
print(shown.getvalue())
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


def test_the_success_of_a_run_is_that_of_its_trained_model(tmp_path: Path) -> None:
    run = TrainedRun(path=tmp_path)
    assert run.success is None
    evaluations = {"initial": FINAL | {"sampled": 0.0}, "final": FINAL}
    for measured, success in ((evaluations, 0.5), ({}, None)):
        (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"eval": measured}))
        assert run.success == success


def test_a_module_has_what_a_definition_needs_and_nothing_that_starts_a_run() -> None:
    made = definitions(NOTEBOOK, ["Env"])
    head = "from __future__ import annotations\n\nimport math, sys\n\nfrom pathlib import Path\n\nsize = 3"
    assert made.startswith(head)
    assert "def area" in made and "train" not in made and "size = 2" not in made
    assert definitions(NOTEBOOK, ["area"]).count("class") == 0
    with pytest.raises(ConfigError, match="Other is not defined at the top of the script or of a cell"):
        definitions(NOTEBOOK, ["Other"])


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("W = ['a']\nW.append('b')", ["a", "b"]),
        ("W = ['a']\nW += ['b']", ["a", "b"]),
        ("W = ['a']\nW = W + ['b']", ["a", "b"]),
        ("W = ['a', 'c']\nW[1] = 'b'", ["a", "b"]),
        ("W = ['a', 'b', 'c']\ndel W[2]", ["a", "b"]),
        ("class W: pass\nW.words = ['b']\nW = W.words", ["b"]),
        ("import xml.dom, slipstream\nimport xml.sax\nslipstream.train()\nW = [xml.dom, xml.sax, slipstream]", None),
        ("W = [1]\nfor word in W:\n    print(word)", [1]),
        ("W = []\nfor w in 'ab':\n    W.append(w)", "W is set inside of `for w in 'ab':`, which is not copied"),
        ("try:\n    import W\nexcept ImportError:\n    W = 1", "W is set inside of `try:`"),
        ("with open('w') as file:\n    W = file.read()", "W is set inside of `with open('w') as file:`"),
        ("if __name__ == '__main__':\n    W = 1", "W is set inside of `if __name__ == '__main__':`"),
    ],
)
def test_what_a_script_changes_after_its_definition_comes_along_or_is_refused(before: str, wanted: object) -> None:
    source = f"{before}\ndef read():\n    word = W\n    return word\n"
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=re.escape(wanted)):
            definitions(source, ["read"])
        return
    names: dict[str, Any] = {}
    exec(made := definitions(source, ["read"]), names)
    assert "train" not in made and (wanted is None or names["read"]() == wanted)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"env": lambda: None}, "cannot be imported by other processes; give a class or function from the top"),
        ({"optim.lrr": 1}, "unknown config key `optim.lrr`; did you mean `optim.lr`?"),
        ({"learning_rate": 1}, "did you mean `optim.lr`?"),
        ({"config": "conf/nowhere.yaml"}, "no config file at conf/nowhere.yaml"),
        ({"name": "one"}, "run 'one' exists in "),
        *(({"dataset": odd}, "`dataset` must be a path, got '") for odd in ([], [{"prompt": "a"}], iter([]), object())),
        ({"model": object()}, "`model` must be a path, got 'object'; save it, and give its path"),
        ({"reward": 5}, "`reward` must be a function, or a list of them, got 5"),
        ({"reward": {"short": len}}, "`reward` must be a function, or a list of them, got "),
        ({"reward": ["a.b:score", "c:score"]}, "functions of different names, got 'a.b:score, c:score'; rename one"),
    ],
)
def test_a_mistake_is_refused_before_any_writing(given: dict[str, object], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=complaint):
        slipstream.train(**{"run.root": str(tmp_path)}, **given)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("given", "check"), [({}, "none"), ({"agent": "a:play"}, None), ({"env": "shop"}, None), ({"reward": None}, None)]
)
def test_the_first_reward_is_the_score_of_a_data_set_alone(
    given: dict[str, Any], check: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Config]()
    monkeypatch.setattr(python_api, "_run", lambda config, *_: started.append(config))
    with pytest.raises(ConfigError, match="no run"):
        slipstream.train(dataset="rows.jsonl", **{"reward": "a:b", "run.root": str(tmp_path), **given})
    assert started[0].env.options.get("check") == check
    assert (started[0].env.rewards.get("b", {}).get("success_from") == 1.0) == (check is not None)


def test_of_two_scripts_that_start_a_run_of_one_name_the_second_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "mine").mkdir()
    (folder / "from_main.py").write_text("of the first")
    with held(folder / "given.yaml"), pytest.raises(ConfigError, match=r"is writing .*given\.yaml; wait for it"):
        slipstream.train(name="mine", reward="a:b", **{"run.root": str(tmp_path)})
    assert (folder / "from_main.py").read_text() == "of the first" and not (folder / "given.yaml").exists()


UP = """#!/bin/sh
trap 'echo interrupted' INT
trap 'echo a checkpoint is written; kill $!; exit 75' TERM
[ -n "$SLIPSTREAM_TEST_BEGINS" ] && cp "$5" "${5%given.yaml}config.yaml"
echo step 1
sleep 60 & wait $!; wait $!
"""


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("begins", "said"),
    [("1", "`slipstream up --resume mine run.root={root}` continues the run"), ("", "before the run")],
)
def test_an_interrupt_that_only_the_caller_gets_ends_the_run_in_order(
    begins: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a Jupyter kernel is interrupted: the run is in a process group of its own."""
    (stand_in := tmp_path / "python").write_text(UP)
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setenv("SLIPSTREAM_TEST_BEGINS", begins)
    log = tmp_path / "mine" / "logs" / "up.log"

    def interrupt() -> None:
        while not log.exists() or "step 1" not in log.read_text():
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGINT)

    (asking := threading.Thread(target=interrupt, daemon=True)).start()
    with pytest.raises(KeyboardInterrupt, match=re.escape(said.format(root=tmp_path))):
        slipstream.train(name="mine", **{"run.root": str(tmp_path)})
    asking.join()
    assert capsys.readouterr().out == "step 1\na checkpoint is written\n"


def test_a_script_trains_on_the_environment_and_the_reward_that_it_defines(tmp_path: Path) -> None:
    """As in a Jupyter kernel: while an event loop runs, with a stdout that is no file, and with FORCE_COLOR."""
    settings = dict(setting.split("=", 1) for setting in GUESS if not setting.startswith("env.name"))
    settings |= {"run.root": str(tmp_path), "eval.num_tasks": "4", "warm_start.episodes": "4", "actors.count": "1"}
    settings |= {"replay.groups_per_step": "2", "replay.drop_zero_variance": "false"}
    (tmp_path / "script.py").write_text(SCRIPT.replace("SETTINGS", repr(settings)))
    folders = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    command = ["-u", "-m", "tests.tools.cli.script", str(tmp_path / "script.py")]
    done = python(*command, cwd=tmp_path, timeout_s=2 * DEADLINE_S, PYTHONPATH=folders, FORCE_COLOR="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step    2" in done.stdout and "held-out success" in done.stdout
    assert "\x1b" not in done.stdout, "the live view of a terminal"
    assert "WORTH = 0.25" in done.stdout and "slipstream.train(" not in done.stdout
