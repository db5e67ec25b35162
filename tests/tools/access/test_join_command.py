"""`slipstream access join`: one command, without secrets, that a host without any file of the run can start with."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.replay.fleet.roles import Role, user_of
from slipstream.tools.cli.cli import main
from tests.tools.cli.verbs import Output

OTHERS = "redis.url=redis://10.0.0.1:6379"
REACHABLE = "weights.host=10.0.0.1"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "")
    monkeypatch.setenv(KEY_VARIABLE, "")
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[list[str], str]:
    assert main(["access", "join", *settings]) == 0
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    return shlex.split(line), shown.err


def test_a_run_without_secrets_needs_the_command_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words, needs = printed(capsys, OTHERS, REACHABLE, "run.name=demo")
    assert words == ["slipstream", "actors", OTHERS, "run.name=demo", "actors.transport=pull"]
    assert needs == ""


def test_the_settings_of_the_runs_actors_are_taken_over_except_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["actors.count=1", "actors.devices=['0','1']", "actors.max_episodes=64"]
    settings += ["actors.notices=aws", "actors.transport=relay"]
    words, _ = printed(capsys, OTHERS, REACHABLE, "run.name=demo", "optim.lr=1e-5", *settings)
    own = load_config(None, words[2:])
    expected = load_config(None, ["run.name=demo", OTHERS, *settings])
    expected.actors.devices = []
    assert dataclasses.asdict(own) == dataclasses.asdict(expected)


@pytest.mark.parametrize("name", ["*", "runs/demo", "a b", "demo*"])
def test_users_are_of_names_of_runs_and_not_of_patterns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["access", "users", "demo", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and f"`run.name` must be 1 to 64 letters, digits, '.', '_' or '-', got '{name}'" in shown.err


def test_the_configuration_in_the_runs_folder_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    text = "run: {name: demo}\nredis: {url: 'redis://10.0.0.1:6379'}\nactors: {transport: relay}\n"
    (folder / "config.yaml").write_text(f"{text}env: {{name: 'mine.env:Env'}}\n")
    words, needs = printed(capsys, "run.name=demo")
    assert words[2:] == ["redis.url=redis://10.0.0.1:6379", "run.name=demo", "actors.transport=relay"]
    assert "install on the host, the same as on the learner's: mine.env\n" in needs


def test_no_secret_is_printed_and_the_host_s_needs_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "weights.key").write_text("k" * 40)
    server = "redis.url=rediss://:s3cret@10.0.0.1:6379?ssl_ca_certs=/etc/ca.pem"
    words, needs = printed(capsys, server, REACHABLE, "weights.key_file=weights.key")
    assert words[2] == "redis.url=rediss://10.0.0.1:6379?ssl_ca_certs=/etc/ca.pem"
    assert "s3cret" not in needs and "k" * 40 not in needs and "weights.key_file" not in " ".join(words)
    assert [line.split(",")[0] for line in needs.splitlines()] == [
        f"set on the host: {PASSWORD_VARIABLE}",
        f"set on the host: {KEY_VARIABLE}",
        "copy to the host: the file that ssl_ca_certs names",
    ]


def test_where_there_are_users_by_role_the_host_gets_an_actors(capsys: pytest.CaptureFixture[str]) -> None:
    learner, actor = (user_of("demo", role) for role in (Role.LEARNER, Role.ACTOR))
    for settings, user in (
        ([f"redis.url=redis://{learner}:pw@10.0.0.1:6379/2"], actor),
        ([f"redis.url=redis://{learner}:pw@10.0.0.1:6379/2", "--fleet=spot1"], f"{actor}-spot1"),
        (["redis.url=redis://10.0.0.1:6379/2", "--fleet=spot1"], f"{actor}-spot1"),
        (["redis.url=redis://me:pw@10.0.0.1:6379/2"], "me"),
    ):
        words, needs = printed(capsys, "run.name=demo", REACHABLE, *settings)
        assert words[2] == f"redis.url=redis://{user}@10.0.0.1:6379/2" and f"the Redis user {user};" in needs


def test_what_no_host_can_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for settings, said in (
        ([], "`redis.url` is empty; give the URL at which the new host reaches"),
        (["redis.url=unix:///tmp/redis.sock"], "is a socket file, which other hosts cannot reach; start the learner"),
        ([OTHERS, "--fleet=a b"], "`--fleet` must be 1 to 32 letters and digits, and none of learner, actor, viewer"),
    ):
        assert main(["access", "join", *settings]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and said in shown.err


def test_a_key_is_written_once_and_where_its_folder_can_be(refused: Output, tmp_path: Path) -> None:
    assert main(["access", "key", "weights.key_file=keys/one"]) == 0
    assert (tmp_path / "keys" / "one").stat().st_mode & 0o777 == 0o600
    for file, said in (
        ("keys/one", "keys/one exists and is not overwritten"),
        ("keys/one/two", "keys/one/two cannot be written: File exists; name another file"),
        ("''", "`weights.key_file` is empty; name the file"),
    ):
        assert said in refused("access", "key", f"weights.key_file={file}")


def test_an_address_of_this_machine_alone_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    _, needs = printed(capsys, "redis.url=redis://localhost:6379")
    assert "`redis.url` is localhost: only hosts" in needs and "`weights.host` is 127.0.0.1: only hosts" in needs
