"""Servers of environments that a verb starts: they answer before the first episode, and end with the verb."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Flag
from slipstream.replay.server.server_settings import free_port
from slipstream.tools.cli.cli import main
from slipstream.tools.run import server_command
from slipstream.tools.run.check_input import check_env
from slipstream.tools.run.server_command import env_servers, playing_on_servers, server_commands
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.guess import WORDS
from tests.processes import MARK, REPOSITORY, marked, nothing_runs
from tests.tools.cli.verbs import Output
from tests.waiting import wait_until

STUB = f"{sys.executable} -m tests.envhub.remote.agentgym_stub"  # speaks AgentGym's wire


def playing(root: Path, port: int, command: str) -> Config:
    """A run of TextCraft's form, whose server `command` starts at `port`, which is PORT in it."""
    options = {"url": f"http://127.0.0.1:{port}/textcraft", "server": "textcraft", "train": [0, 3]}
    given = json.dumps(options | {"server_command": command.replace("PORT", str(port))})
    return load_config(None, [f"run.root={root}", "env.name=agentgym", f"env.options={given}"])


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, run_id: str) -> int:
    """A free port; and what the test starts carries its mark."""
    monkeypatch.setenv(MARK, run_id)
    return free_port()


# A command, and how many processes it is beside the guard.
COMMANDS = {
    "a program": (f"{STUB} PORT", 1),
    "a shell with a child, as `conda run`": (f"sh -c '{STUB} PORT; true'", 2),
    "a program that ignores SIGTERM": (f"sh -c \"trap '' TERM; {STUB} PORT & wait; sleep 600\"", 2),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_server_answers_before_the_first_episode_and_ends_with_the_verb(
    tmp_path: Path, port: int, run_id: str, kind: str
) -> None:
    command, num_processes = COMMANDS[kind]
    config = playing(tmp_path, port, command)
    with env_servers(config, stop=Flag()) as (server,):
        assert server.exit_code is None and server_command._answers(f"http://127.0.0.1:{port}/textcraft")
        assert len(marked(run_id)) == 1 + num_processes
    assert server.exit_code is not None and nothing_runs(run_id)
    assert f"port {port}" in RunDir(tmp_path, config.run.name).log("server-agentgym").read_text()


@pytest.mark.parametrize(
    ("kind", "number"), [*((kind, signal.SIGKILL) for kind in COMMANDS), ("a program", signal.SIGINT)]
)
def test_a_server_does_not_outlive_a_verb_that_is_killed(
    tmp_path: Path, port: int, run_id: str, kind: str, number: signal.Signals
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(dump_config(playing(tmp_path, port, COMMANDS[kind][0])))
    code = """
import sys, time
from slipstream.common.config.config import load_config
from slipstream.tools.run.server_command import playing_on_servers
with playing_on_servers(load_config(sys.argv[1], [])):
    print("up", flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", code, str(settings)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as verb:
        assert verb.stdout and verb.stdout.readline() == "up\n"
        assert len(marked(run_id)) == 2 + COMMANDS[kind][1]
        verb.send_signal(number)
    wait_until(lambda: nothing_runs(run_id), "the end of the server")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])  # in the background of a shell
def test_a_server_that_ends_in_the_middle_interrupts_the_verb_and_is_named(
    tmp_path: Path, port: int, run_id: str, handler: Any
) -> None:
    config = playing(tmp_path, port, f"{STUB} {port}")
    why = r"(?s)server-agentgym ended with code 137 in the middle; the last lines of .*\nport \d+\n"
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(ConfigError, match=why), playing_on_servers(config):
            (stub,) = (each for each in marked(run_id) if each.cmdline()[1:2] == ["-m"])
            stub.kill()
            time.sleep(600)
            pytest.fail("nothing was interrupted")
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert nothing_runs(run_id)


NEVER: dict[str, tuple[str, str]] = {
    "it ends": ("sh -c 'echo no such data; exit 3'", r"ended with code 3 before http://.*\nno such data$"),
    "it ends as if all were well": ("true", r"ended with code 0 before"),
    "a code that would be ours": ("sh -c 'echo usage; exit 2'", r"ended with code 1 before .*\nusage$"),
    "there is no such program": ("no-such-program --port 1", r"ended with code 127 before.*no-such-program"),
    "it does not listen": ("sleep 600", r"has not answered at http://.* for 1 s"),
    "it accepts and is silent": (
        f"{sys.executable} -c \"import socket, time; s = socket.create_server(('127.0.0.1', PORT)); time.sleep(600)\"",
        r"has not answered at http://.* for 1 s",
    ),
}


@pytest.mark.parametrize("how", NEVER)
def test_a_server_that_never_answers_is_refused_with_its_last_lines(
    tmp_path: Path, port: int, run_id: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(server_command, "START_S", 1.0)
    monkeypatch.setattr(server_command, "ANSWER_S", 0.5)
    command, named = NEVER[how]
    config = playing(tmp_path, port, command)
    with pytest.raises(ConfigError, match=f"(?s)server-agentgym {named}"), env_servers(config, stop=Flag()):
        pytest.fail("it has never answered")
    assert nothing_runs(run_id)


def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path: Path, port: int, run_id: str) -> None:
    refused = pytest.raises(ConfigError, match=rf"`env.options.url` http://127.0.0.1:{port}/textcraft is in use")
    config = playing(tmp_path, port, f"{STUB} PORT")
    with socket.create_server(("127.0.0.1", port)), refused, env_servers(config, stop=Flag()):
        pytest.fail("the port is taken")
    assert list(tmp_path.iterdir()) == [] and nothing_runs(run_id)


def test_a_request_to_stop_ends_the_wait_for_a_server(tmp_path: Path, port: int, run_id: str) -> None:
    stop = Flag()
    stop.set()
    with env_servers(playing(tmp_path, port, "sleep 600"), stop=stop) as (server,):
        assert server.exit_code is None
    assert nothing_runs(run_id)


def test_a_command_or_a_url_that_cannot_be_is_refused() -> None:
    bad = [{"server_command": command, "url": "http://127.0.0.1:1"} for command in ("sh -c 'open", " ", ["sleep"])]
    urls = ("https://127.0.0.1:1", "http://127.0.0.1:x", "http://:80")
    for options in [*bad, *({"server_command": "sleep 1", "url": url} for url in urls), {"server_command": "sleep 1"}]:
        config = load_config(None, [f"env.options={json.dumps(options)}"])
        with pytest.raises(ConfigError, match=r"`env.options.server_command` of shop must be a command"):
            server_commands(config.env)
            pytest.fail(f"{options} was accepted")


def test_an_empty_command_starts_nothing(tmp_path: Path) -> None:
    written = tmp_path / "settings.yaml"
    written.write_text(dump_config(playing(tmp_path, 1, "sleep 600")))
    config = load_config(str(written), ["env.options.server_command="])
    assert server_commands(config.env) == {}
    check_env(config.env)


def test_parts_of_a_mixture_share_a_server_by_its_command() -> None:
    entry = {"name": "agentgym", "options": {"server_command": "serve", "url": "http://127.0.0.1:1/maze"}}
    other = {"name": "agentgym", "options": {"server_command": "serve", "url": "http://127.0.0.1:1/wordle"}}
    config = load_config(None, [f"env.mixture={json.dumps({'maze': entry, 'wordle': other})}"])
    assert server_commands(config.env) == {"serve": ("maze", "http://127.0.0.1:1/maze")}


def test_a_dry_run_prints_a_command_and_starts_nothing(tmp_path: Path, port: int, run_id: str, printed: Output) -> None:
    options = {"url": f"http://127.0.0.1:{port}", "env": "tests.guess:GuessEnv", "server_command": f"{STUB} {port}"}
    settings = ["env.name=remote", f"env.options={json.dumps(options)}", f"run.root={tmp_path}"]
    assert f"server-remote: {STUB} {port}\n" in printed("up", "run.name=dry", "--dry-run", *settings)
    assert nothing_runs(run_id)


def test_collect_plays_on_the_server_that_it_starts(tmp_path: Path, port: int, run_id: str) -> None:
    model, target = tmp_path / "model", tmp_path / "rows.jsonl"
    make_tiny_model(model, texts=WORDS, shape=TinyShape(), max_tokens=512, seed=0)
    serve = f"{sys.executable} -m slipstream.tools.cli.cli serve envs --names tests.guess:GuessEnv --port {port}"
    options = {"url": f"http://127.0.0.1:{port}", "env": "tests.guess:GuessEnv", "server_command": serve}
    settings = ["env.name=remote", f"env.options={json.dumps(options)}", f"run.root={tmp_path}", "run.name=far"]
    assert main(["collect", str(target), "--expert", "--num-tasks", "3", f"model.path={model}", *settings]) == 0
    assert len(target.read_text().splitlines()) == 3
    assert RunDir(tmp_path, "far").log("server-remote").exists()
    assert nothing_runs(run_id)
