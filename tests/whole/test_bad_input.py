"""Bad input: one line that says what is wrong and what to do, exit code 2, and nothing is started or lost."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.envhub.rewards.rubric import read_rubric
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.server.redis_server import Server
from slipstream.replay.server.server_settings import free_port
from slipstream.tools.cli.cli import main
from slipstream.tools.data.chat_file import read_chat_file
from slipstream.tools.data.judge_rows import read_judge
from slipstream.tools.road.road_file import read_file
from slipstream.tools.run.check_input import check_model_folder
from slipstream.tools.run.prepare import prepare
from tests.full_disk import largest_file
from tests.processes import GUESS, Run, nothing_runs, python
from tests.replay.buffer.every_verb import FACTS
from tests.tools.cli.verbs import Output, slipstream

REASON = "the last one: env_failure: RuntimeError: the database is gone"
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 128}


def num_children() -> int:
    """The processes that this one has started, without the images from which tests fork."""
    return sum("tests.preload_image" not in child.cmdline() for child in psutil.Process().children())


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Output:
    """Runs a verb in this process and returns the one line of complaint; nothing may have been made or started."""

    def run(verb: str, *settings: str) -> str:
        before = num_children()
        assert main([*verb.split(), *settings, f"run.root={tmp_path}/runs"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"slipstream {verb}: ") and err.count("\n") == 1
        assert not (tmp_path / "runs").exists()
        assert num_children() == before
        return err

    return run


def test_a_file_that_is_no_configuration_is_named(refused: Output, tmp_path: Path) -> None:
    assert "no config file at nowhere.yaml" in refused("up", "nowhere.yaml")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("run: [1")
    assert f"cannot read {wrong}: while parsing a flow sequence" in refused("up", str(wrong))
    wrong.write_text("- 1\n")
    assert f"cannot read {wrong}: " in refused("up", str(wrong))
    wrong.write_text("{}\n")
    assert "cannot read learner.steps=[1 " in refused("up", str(wrong), "learner.steps=[1")


READERS: dict[str, Callable[[str], object]] = {
    "a configuration": lambda path: load_config(path, []),
    "a road": read_file,
    "a rubric": lambda path: read_rubric("env.rewards.judge.rubric", path),
    "a judge": lambda path: read_judge(Path(path)),
    "a server": lambda path: read_chat_file(Path(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_yaml_file_that_cannot_be_read_is_named_by_every_reader(tmp_path: Path, reader: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    for content, why in (
        (b"run: " + 3000 * b"[" + 3000 * b"]", "nested too deeply"),
        (b"a: \xff", "can't decode"),
        (b"- [", "parsing"),
    ):
        wrong.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{wrong}.* {why}"):
            READERS[reader](str(wrong))


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["up", f"run.root={tmp_path}/file"]) == 2
    assert f"`run.root` {tmp_path}/file: " in (message := capsys.readouterr().err)
    assert "cannot be created: Not a directory; name a folder that can be written" in message
    with pytest.raises(ConfigError, match="cannot be created: File name too long"):
        RunDir(tmp_path / (300 * "a"), "run").create()


LONG = 300 * "a"


@pytest.mark.parametrize(
    "command",
    ["up {}", "runs run.root={}", "data {}.jsonl --data=README.md", "fit sft --data={}", "up model.path={}"],
)
def test_a_name_that_is_too_long_is_named(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main(command.format(LONG).split()) == 2
    message = capsys.readouterr().err
    assert LONG in message and "File name too long" in message and message.count("\n") == 1


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    program = "import sys; from slipstream.tools.cli.cli import main; sys.exit(main(['up', '--print-config']))"
    with (tmp_path / "out").open("w") as out, largest_file(bytes_allowed=100):
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # without a buffer, Python takes a short write for a whole one
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=buffered)
    assert done.returncode == 1
    assert done.stderr == "slipstream up: standard output or a file: File too large; free space\n"


def test_an_error_of_no_file_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("slipstream.tools.see.runs.Path.glob", fail)
    with pytest.raises(TimeoutError):
        main(["runs"])


def test_ctrl_c_while_modules_are_imported_shows_no_traceback() -> None:
    program = (
        "import sys; from slipstream.tools.cli.start import main\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'slipstream.tools.cli.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting()); sys.exit(main())"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_redis_url_that_leads_nowhere_is_named_without_its_password(redis_server: Server, refused: Output) -> None:
    assert "`redis.url` redis://127.0.0.1:1 does not answer: " in refused("up", "redis.url=redis://127.0.0.1:1")
    assert "with / and @ in a password as %2F and %40, got 'nonsense'" in refused("up", "redis.url=nonsense")
    assert "`redis.url` is empty" in refused("actors") and "`redis.url` is empty" in refused("learner")
    address = redis_server.url.removeprefix("redis://")
    complaint = refused("top", f"redis.url=redis://:wr0ng@{address}")
    assert f"`redis.url` redis://{address} refused the password" in complaint and "wr0ng" not in complaint
    unquoted = refused("up", f"redis.url=redis://:wr0ng/pass@{address}")
    assert "redis://***@" in unquoted and "wr0ng" not in unquoted


def test_an_environment_that_cannot_be_had_is_named_before_anything_starts(refused: Output) -> None:
    assert "or module:Class for your own environment, got 'shpo'; did you mean shop?" in refused("up", "env.name=shpo")
    assert "cannot import tests.nowhere" in refused("up", "env.name=tests.nowhere:Env")
    unmade = "UnmadeEnv' with `env.options` {} failed to start: OSError: no such database"
    assert unmade in refused("up", "env.name=tests.envhub.failing:UnmadeEnv")
    assert "`env.options` {'size': 3} are not valid for shop" in refused("up", "env.options.size=3")
    assert "`env.options.profile` must be small or full" in refused("up", "env.options.profile=big")
    assert "did you mean action_tag?" in refused("up", "env.action_format=acton_tag")


def test_a_run_that_needs_a_missing_expert_is_answered_with_what_to_do_without(tmp_path: Path) -> None:
    env, cure = "env.name=tests.envhub.failing:ExpertlessEnv", "set model.path=FOLDER and warm_start.episodes=0"
    with pytest.raises(ConfigError, match=f"failed to play: NotImplementedError: .*{cure}"):
        prepare(load_config(None, [env, f"run.root={tmp_path}"]))


def test_an_address_that_cannot_be_bound_is_named_before_anything_starts(refused: Output) -> None:
    assert "`weights.host` must be an IPv4 address of this machine" in refused("up", "weights.host=203.0.113.7")
    assert "'localhost'" in refused("up", "weights.host=localhost")
    assert "'auto' cannot be bound" in refused("serve relay", "weights.host=auto", "redis.url=redis://no.such.host:1")
    for verb in ("up", "serve relay"):
        assert "is not an address that actors can connect to" in refused(verb, "weights.host=0.0.0.0")
        assert "'*' cannot be bound" in refused(verb, "weights.host='*'")


def test_a_disk_without_room_is_named_before_anything_starts(
    refused: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: whole._replace(free=3 << 20))
    complaint = refused("up")
    assert f"`run.root` {tmp_path}/runs has 3 MiB of free disk" in complaint and "on another disk" in complaint


def test_a_port_in_use_is_passed_over_for_another() -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


def test_a_model_folder_that_lacks_something_is_named_with_what_it_lacks(refused: Output, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    here = f"model.path={folder}"
    assert "is not a directory; name one, or a model of the Hub" in refused("up", here)
    folder.mkdir()
    assert "it has no config.json" in refused("up", here)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "has no *.safetensors" in refused("up", here)
    (folder / "model.safetensors").touch()
    assert "model.safetensors is not a safetensors file: Error while deserializing header" in refused("up", here)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "has no tokenizer" in refused("up", here)
    (folder / "tokenizer_config.json").write_text("{}")
    assert "its tokenizer has no chat template" in refused("up", here)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "`model.max_tokens` must be <= 128" in refused("up", here)
    (folder / "config.json").write_text("{")
    assert f"{folder / 'config.json'} is not JSON" in refused("up", here)
    (folder / "config.json").write_text(f'{{"a": {100_000 * "["}{100_000 * "]"}}}')
    for verb in ("up", "plan"):
        assert f"{folder / 'config.json'} is not JSON: it is nested too deeply" in refused(verb, here)
    (folder / "config.json").write_bytes(b"\xff" * 9)
    assert f"{folder / 'config.json'} is not JSON: 'utf-8' codec can't decode" in refused("plan", here)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    check_model_folder(folder, max_tokens=128)


@pytest.mark.parametrize("option", [["up", "--resume"], ["learner", "--replay-archive"]])
def test_the_empty_name_of_a_run_is_refused(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*option, ""])
    assert "got an empty name; give that of a run" in capsys.readouterr().err


def test_up_refuses_an_existing_run_without_resume_and_resume_refuses_a_missing_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"run: {{name: {name}, root: {tmp_path}}}\n")
    no_three = f"no run 'three' under {tmp_path}/; existing runs: one, two"
    for command, complaint in (
        ("up run.name=one", f"run 'one' exists in {tmp_path / 'one'}; continue it by `--resume one [key=value ...]`"),
        ("up --resume one run.rerun_of=two", "continue it by `slipstream learner one`"),
        ("learner --replay-archive three", no_three),
        ("up --resume three", no_three),
        ("up conf/quickstart.yaml --resume one", "got conf/quickstart.yaml with --resume or --replay-archive"),
    ):
        assert main([*command.split(), f"run.root={tmp_path}"]) == 2
        assert complaint in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["config.yaml", "config.yaml"]


def test_an_actor_pointed_at_a_run_that_is_not_there_waits_and_then_names_those_that_are(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    with connect(redis_server.secret_url) as client:
        Fleet(client, run_id).describe_run(FACTS)
    settings = ["run.name=nowhere", f"run.root={tmp_path}", "actors.count=1", "actors.join_timeout_s=1"]
    done = slipstream("actors", *settings, f"redis.url={redis_server.secret_url}")
    assert done.returncode == 2
    complaint = "slipstream actors: `run.name` nowhere is not on this Redis server; it has the runs "
    assert any(line.startswith(complaint) for line in done.stderr.splitlines()), done.stderr
    # On a slow machine it also says that the actor is gone.
    assert run_id in done.stderr and "Traceback" not in done.stderr
    log = (tmp_path / "nowhere" / "logs" / "actor-0.log").read_text()
    assert "waiting up to 1 s for the learner" in log and "Traceback" not in log
    assert redis_server.password not in log + done.stdout + done.stderr


def test_an_environment_that_raises_is_never_trained_on_and_the_learner_says_why_it_waits(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """It breaks after the model was made from its texts, as a database that goes away in the night."""
    broken = tmp_path / "broken"
    settings = [*GUESS, "env.name=tests.envhub.failing:FailingEnv", f"env.options={{broken: {broken}}}"]
    settings += ["replay.max_attempts=2"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        learner = run.start_learner()
        run.wait_until(run.is_described, "the learner describes the run")
        broken.touch()
        actor = run.start_scripted_actor("actor")
        run.wait_until(lambda: run.ledger().dropped.get("env_failure", 0) > 4, "groups are dropped")
        run.wait_until(lambda: REASON in learner.last_words(), "the learner says why it waits")
        actor.send(signal.SIGTERM)
        assert actor.wait() == EXIT_PREEMPTED
        learner.send(signal.SIGTERM)
        assert learner.wait() == EXIT_PREEMPTED
        ledger = run.ledger()
        assert set(ledger.dropped) == {"env_failure"} and run.last_step() == 0
        assert ledger.inserted == ledger.trained == 0 and ledger.balanced and run.audit() == []
    with Run(run_id, root=tmp_path, server=redis_server, settings=[*settings, "learner.claim_timeout_s=1"]) as run:
        learner = run.start_learner()
        assert learner.wait() == 2
        last = learner.last_words().splitlines()[-1]
        assert last.startswith("slipstream learner: step 1: no complete batch within 1 s (learner.claim_timeout_s)")
        assert REASON in last
        run.wait_until(lambda: nothing_runs(run_id), "every process is gone", deadline_s=30)
