"""AgentBench's tasks in an operating system, from files in their true form that are written here."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError
from tests.adapters.held import acted, keeps
from tests.envhub.assets.test_asset_sql import CHECKS
from tests.envhub.env_cases import Case

COMPARE = [None, {"language": "python", "file": "check/same.py"}]


def asked(description: str, init: str, example: str) -> dict[str, Any]:
    """A question in the form of data/5: judged by what the example prints."""
    return {
        "description": description,
        "create": {"local": "default", "init": {"code": init}},
        "evaluation": {"check": COMPARE, "example": {"code": example}},
        "labels": ["file"],
    }


DOTS = "touch /usr/.a$RANDOM /usr/.b$RANDOM\nmkdir /usr/.c\necho 123>/usr/d"  # 123 is a descriptor
HIDDEN = asked("How many hidden files are in /usr?", DOTS, "find /usr -maxdepth 1 -name '.*' -type f | wc -l")
USERS = asked("How many users are there?", "useradd -m -s /bin/bash ann && useradd bob", "getent passwd | wc -l")
COMMAND = {
    "description": "Let the command twice print its argument two times.",
    "create": {"local": "default"},
    "evaluation": {"check": [{"file": "check/twice.sh"}], "example": {"file": "example/twice.sh"}},
}
MODES = {
    "description": "Let all files in ~/notes have the mode 660.",
    "create": {"init": ["mkdir ~/notes", {"code": "cd ~/notes && touch a b && chmod 000 b"}]},
    "evaluation": {"check": {"code": '[ -z "$(find ~/notes -type f ! -perm 660)" ]'}, "example": "chmod 660 ~/notes/*"},
}
PLUM = {"create": {"init": "echo plum > /root/word"}, "evaluation": {"match": "plum"}}
WORD = {"description": "What is in ~/word?"} | PLUM
FRUIT = {"description": "Name a fruit with a u.", "evaluation": {"match": {"regex": "^(plum|guava)$"}}}
PLAYED = [HIDDEN, USERS, COMMAND, MODES, WORD, FRUIT]
HIDDEN_AT, USERS_AT, COMMAND_AT, MODES_AT, WORD_AT, FRUIT_AT = range(6)

OWN_PYTHON = "bash cd /usr/local/bin; printf '#!/bin/bash\\n' | tee python3 twice; chmod +x *"

LEFT_OUT = [
    {**WORD, "create": {"local": "packages"}},
    {**WORD, "create": {"image": "ubuntu"}},
    {**WORD, "start": "python3 -c 'while True: pass' &"},
    {**WORD, "create": {"init": "useradd ann && su - ann"}},
    {**WORD, "create": {"init": "apt-get update && apt-get install -y lsof"}},
    {**WORD, "create": {"init": "for i in 1 2; do\n  (sleep 60) &\ndone"}},
    asked("How many processes?", "true", "ps -A | wc -l"),
    asked("How many new files?", "touch /home/a", "find /home -type f -mtime -1 | wc -l"),
    {**WORD, "create": {"init": "head -c 9 /dev/urandom > /root/x"}},
    {**WORD, "create": {"init": "chmod u+s /usr/bin/find"}},
    asked("Which file is newest?", "touch /home/1", "ls -lt /home | wc -l"),
    {**WORD, "evaluation": {"check": {"language": "c++", "code": "int main() {}"}}},
    {**WORD, "evaluation": {"check": {"file": "../../../secret.sh"}}},
    {**WORD, "evaluation": {"check": [None, {"code": "true"}]}},
    {**WORD, "evaluation": {"match": {"regex": "(plum"}}},
]


def written(folder: Path) -> dict[str, str]:
    """AgentBench's folders: data/5/new.json with scripts/5, and data/dev.json with scripts/dev."""
    for name in ("5", "dev"):
        for kind in ("check", "example"):
            (folder / "scripts" / name / kind).mkdir(parents=True)
        scripts = folder / "scripts" / name
        (scripts / "check/same.py").write_text("from sys import argv\nexit(int(argv[1]) != int(argv[2]))\n")
        right = '[ "$(twice ab)" = "$(python3 -c \'print("ab" * 2)\')" ]'
        (scripts / "check/twice.sh").write_text(f"#!/bin/bash\n{right} || exit 1\nexit 0\n")
        made = "echo '#!/bin/bash\necho $1$1' > twice\nchmod +x twice && mv twice /usr/local/bin/\n"
        (scripts / "example/twice.sh").write_text(made)
    (folder / "data/5").mkdir(parents=True)
    (folder / "data/5/new.json").write_text(json.dumps(PLAYED))
    (folder / "data/dev.json").write_text(json.dumps(PLAYED))
    return {"train": str(folder / "data"), "held_out": str(folder / "data/dev.json")}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return written(tmp_path_factory.mktemp("os_interaction"))  # once: each of them is rehearsed once in a process


def of_one(tmp_path: Path, item: dict[str, Any]) -> dict[str, str]:
    path = tmp_path / "data/5/one.json"
    path.write_text(json.dumps(item))
    return {"train": str(path)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[..., None], options: dict[str, str]) -> None:
    samples = ("Act: bash\n```bash\nls /root\n```",)
    keeps(check, Case("agentbench_os", 4, 0, options, is_spaced=False, share=0.02, max_walk=2, samples=samples))


@pytest.mark.parametrize(
    ("index", "actions", "score"),
    [
        (HIDDEN_AT, ["Act: answer(2)"], 1.0),
        *((HIDDEN_AT, [f"Act: answer({wrong})"], 0.0) for wrong in ("3", "two")),
        *((index, ["Act: finish"], 0.0) for index in (HIDDEN_AT, WORD_AT, COMMAND_AT)),
        (HIDDEN_AT, ["bash rm -r /usr/.a* /usr/.b*", "Act: answer(0)"], 0.0),  # the question stays what it was
        (USERS_AT, ["bash useradd eve", "Act: answer(20)"], 1.0),
        (WORD_AT, ["Act: answer( plum )"], 1.0),
        (WORD_AT, ["Act: answer(plums)"], 0.0),
        (FRUIT_AT, ["Act: answer(guava)"], 1.0),
        (FRUIT_AT, ["Act: answer(a guava)"], 0.0),
        (MODES_AT, ["bash cat ~/notes/b; chmod 660 ~/notes/*", "Act: finish"], 1.0),
        (MODES_AT, ["bash chmod 660 ~/notes/a", "Act: finish"], 0.0),
        (COMMAND_AT, ["bash cd /usr/local/bin; echo 'echo $1$1' > twice; chmod +x twice", "Act: finish"], 1.0),
        (COMMAND_AT, [OWN_PYTHON, "Act: finish"], 0.0),  # it is not the one that checks
    ],
)
def test_it_is_judged_as_in_agentbench(options: dict[str, str], index: int, actions: list[str], score: float) -> None:
    end = acted("agentbench_os", options, index, actions)[-1]
    assert (end.terminated, end.score) == (True, score)


def test_a_command_is_roots_in_a_root_directory_on_what_the_last_one_left(options: dict[str, str]) -> None:
    change = "bash id -un; pwd; cat /root/word; echo x > /etc/x; mkdir -p /srv/a; rm -r /opt; cd /srv"
    way = [change, "bash pwd; cat /etc/x; ls -d /srv/a /opt", "bash true", "bash seq 1000", "bash seq 1000; exit 137"]
    turns = acted("agentbench_os", options, WORD_AT, way)[1:]
    first, second, third, fourth, fifth = (turn.messages[0].content for turn in turns)
    assert first == "The output of the OS:\n\nroot\n/\nplum\n"
    assert second.startswith("The output of the OS:\n\n/\nx\n") and "cannot access '/opt'" in second
    assert third == "The output of the OS is empty."
    assert fourth.endswith("[truncated because the output is too long]") and len(fourth) < 900
    assert fifth.startswith(fourth) and "[killed" in fifth


def test_what_a_sandbox_does_not_have_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = written(tmp_path)
    (tmp_path / "data/5/other.json").write_text(json.dumps([*LEFT_OUT, WORD]))
    with caplog.at_level(logging.WARNING):
        asked_for = {acted("agentbench_os", options, index, [])[0].messages[1].content for index in range(16)}
    assert asked_for == {item["description"] for item in PLAYED}
    assert f"left out {len(LEFT_OUT)} of {len(LEFT_OUT) + 7} tasks" in caplog.text
    assert "2 that need a special image" in caplog.text
    for item in LEFT_OUT:
        with pytest.raises(ValueError, match="no task that works in the sandbox: 1 that "):
            make_env("agentbench_os", of_one(tmp_path, item))


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({**WORD, "create": {"init": "chmod 700 /usr/bin/find"}}, "init script failed here.*Read-only"),
        ({**WORD, "create": {"init": "date +%N > /root/x"}}, "left different files"),
        ({**MODES, "evaluation": {"check": "test -e ~/x", "example": "true"}}, "own example, .* not pass its checks"),
        (asked("Now?", "true", "date +%N"), "its example printed"),
    ],
)
def test_a_task_that_does_not_work_is_an_error_and_no_reward(tmp_path: Path, item: dict[str, Any], why: str) -> None:
    written(tmp_path)
    with pytest.raises(EnvError, match=why):
        acted("agentbench_os", of_one(tmp_path, item), 0, ["Act: finish"])


def test_files_that_are_missing_say_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"get data/os_interaction of github\.com/THUDM/AgentBench"):
        make_env("agentbench_os", {"train": str(tmp_path / "none")})
