"""`slipstream launch`: what is written for Kubernetes, Slurm, SkyPilot and Ray is what each of them takes."""

import dataclasses
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.common.transfer.curve import KEY_VARIABLE
from slipstream.tools.cli.cli import main
from slipstream.tools.launch.kubernetes import manifest, resource_name
from slipstream.tools.launch.launch import ENGINES, launch
from slipstream.tools.launch.launch_options import LaunchOptions
from slipstream.tools.launch.skypilot import actors_task, launch_job, learner_task
from slipstream.tools.launch.slurm import actors_script, learner_script

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 60.0
SETTINGS = Path("/shared/launch/demo/config.yaml")

# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run", "config"}
SKY_RESOURCES = {
    "infra",
    "accelerators",
    "accelerator_args",
    "cpus",
    "memory",
    "instance_type",
    "use_spot",
    "disk_size",
    "disk_tier",
    "network_tier",
    "image_id",
    "ports",
    "labels",
    "autostop",
    "any_of",
    "ordered",
    "job_recovery",
}
# https://slurm.schedmd.com/sbatch.html, of those that take a value and that this program writes
SBATCH_OPTIONS = {
    "--job-name",
    "--nodes",
    "--ntasks",
    "--cpus-per-task",
    "--mem",
    "--gpus-per-node",
    "--open-mode",
    "--output",
    "--signal",
    "--array",
    "--partition",
}


def configured(*settings: str) -> Config:
    return load_config(None, ["run.name=Demo_1.x", "run.root=/shared/runs", "redis.url=redis://redis:6379", *settings])


def hosts(**changes: Any) -> LaunchOptions:
    usual = LaunchOptions(
        image="registry/slipstream:1", volume="runs", actor_hosts=3, actor_gpus=2, learner_gpus=4, gpu="H100"
    )
    return dataclasses.replace(usual, **changes)


def objects(config: Config) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(manifest(config, hosts()))}


def test_kubernetes_gets_a_learner_and_any_number_of_actors_that_may_be_preempted() -> None:
    made = objects(configured())
    assert set(made) == {
        ("ConfigMap", "slipstream-demo-1-x-25db0e8f-settings"),
        ("Job", "slipstream-demo-1-x-25db0e8f-learner"),
        ("Job", "slipstream-demo-1-x-25db0e8f-actors"),
    }
    actors, learner = (
        made["Job", "slipstream-demo-1-x-25db0e8f-actors"]["spec"],
        made["Job", "slipstream-demo-1-x-25db0e8f-learner"]["spec"],
    )
    assert (learner["parallelism"], learner["completions"], actors["parallelism"]) == (1, 1, 3)
    assert "completions" not in actors
    for spec, gpus, grace_s in ((learner, "4", 60), (actors, "2", 20)):
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == grace_s
        left = {"containerName": container["name"], "operator": "In", "values": [EXIT_PREEMPTED]}
        assert {"action": "Ignore", "onExitCodes": left} in spec["podFailurePolicy"]["rules"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    settings = made["ConfigMap", "slipstream-demo-1-x-25db0e8f-settings"]["data"]["config.yaml"]
    assert yaml.safe_load(settings)["redis"]["url"] == "redis://redis:6379"


def test_objects_of_runs_whose_names_are_alike_to_kubernetes_are_not_the_same() -> None:
    """The second one would take the first one's settings, which its learner reads when its pod is made again."""
    long = "tools_qwen3-8b_gspo_lr1e-6_temperature1_seed"
    names = ["demo", "Demo", "demo-1", "demo_1", "demo.1", "demo-1-", f"{long}1", f"{long}2", "x" * 64]
    made = [resource_name(configured(f"run.name={name}"), "settings") for name in names]
    assert len(set(made)) == len(names) and made[0] == "slipstream-demo-settings"
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) < 64 for name in made)


@pytest.mark.parametrize("task", [learner_task, actors_task])
def test_skypilot_gets_keys_that_it_knows(task: Any) -> None:
    made = yaml.safe_load(task(configured(), hosts(infra="aws/eu-west-1", volume="s3://runs"), SETTINGS))
    assert set(made) <= SKY_KEYS and set(made["resources"]) <= SKY_RESOURCES
    assert made["resources"]["accelerators"] == ("H100:2" if task is actors_task else "H100:4")
    assert made["resources"]["use_spot"] is (task is actors_task)
    mounts = made.get("file_mounts", {})
    assert mounts.get("/shared/runs") == (None if task is actors_task else {"source": "s3://runs", "mode": "MOUNT"})
    assert made["secrets"] == {"SLIPSTREAM_REDIS_PASSWORD": None}
    assert ("actors.instance_kind=spot" in made["run"]) is (task is actors_task)


def test_hosts_of_actors_need_no_volume_and_no_file_and_get_their_own_settings() -> None:
    """The settings that the command has are those of `actors` that the run's configuration has changed."""
    config = configured("actors.max_episodes=64", "actors.drain_s=20", "actors.transport=pull", "optim.lr=1e-5")
    pod = objects(config)["Job", "slipstream-demo-1-x-25db0e8f-actors"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["memory"]
    scripts = [
        shlex.join(pod["containers"][0]["command"]),
        yaml.safe_load(actors_task(config, hosts(volume=""), SETTINGS))["run"],
        actors_script(config, hosts(volume=""), SETTINGS),
    ]
    for script in scripts:
        (words,) = [shlex.split(line) for line in script.splitlines() if "slipstream actors" in line]
        given = itertools.takewhile(lambda word: not word.startswith("weights.host"), words[2:])
        own = load_config(None, list(given))
        assert (own.run.name, own.redis.url) == ("Demo_1.x", "redis://redis:6379")
        assert dataclasses.asdict(own.actors) == dataclasses.asdict(config.actors)
        assert "/shared" not in script.split("slipstream actors")[1] and "optim" not in script


def test_the_weights_key_comes_from_the_secret_or_the_shell_that_launches() -> None:
    config = configured("weights.key_file=weights.key")
    for verb in ("learner", "actors"):
        (container,) = objects(config)["Job", f"slipstream-demo-1-x-25db0e8f-{verb}"]["spec"]["template"]["spec"][
            "containers"
        ]
        given = {each["name"]: each["valueFrom"].get("secretKeyRef") for each in container["env"]}
        secret = {"name": "slipstream-redis", "optional": True}
        assert given[KEY_VARIABLE] == secret | {"key": "weights-key"}
        assert given[PASSWORD_VARIABLE] == secret | {"key": "password"}
    assert set(yaml.safe_load(actors_task(config, hosts(), SETTINGS))["secrets"]) == {PASSWORD_VARIABLE, KEY_VARIABLE}
    assert launch_job(config, Path("a.yaml"), "a")[5:9] == ["--secret", PASSWORD_VARIABLE, "--secret", KEY_VARIABLE]


def test_a_missing_setting_that_an_engine_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"`--image` is empty"):
        manifest(configured(), hosts(image=""))
    for write in (manifest, lambda config, options: learner_task(config, options, SETTINGS)):
        with pytest.raises(ConfigError, match=r"got `--volume` '' and `run.root` '/shared/runs'"):
            write(configured(), hosts(volume=""))
        with pytest.raises(ConfigError, match=r"`run.root` 'runs'; .* and the absolute path to mount it at"):
            write(configured("run.root=runs"), hosts())
    with pytest.raises(ConfigError, match=r"`--gpu` is empty"):
        actors_task(configured(), hosts(gpu=""), SETTINGS)
    with pytest.raises(ConfigError, match=r"`--sbatch` must be options like --partition=gpu"):
        hosts(sbatch="-p gpu")


@pytest.mark.parametrize("write", [learner_script, actors_script])
def test_slurm_gets_options_that_it_knows_and_a_script_that_bash_reads(write: Any) -> None:
    script = write(configured(), hosts(sbatch="--partition=gpu"), SETTINGS)
    lines = script.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash" and lines[1 : len(options) + 1] == [f"#SBATCH {option}" for option in options]
    assert {option.partition("=")[0] for option in options if "=" in option} <= SBATCH_OPTIONS
    assert [option for option in options if "=" not in option] == ["--requeue"]
    assert "--signal=B:TERM@60" in options and "--partition=gpu" in options
    assert ("--array=0-2" in options) is (write is actors_script)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_learner_on_several_hosts_is_a_slurm_job_of_as_many_nodes(tmp_path: Path) -> None:
    """By stand-ins for slipstream and for Slurm's srun, which starts its command once for each node."""
    config = configured("learner.hosts=2", "learner.ranks=4")
    script = learner_script(config, hosts(), SETTINGS)
    assert "#SBATCH --nodes=2" in script and "#SBATCH --ntasks=2" in script
    assert "#SBATCH --nodes=1" in actors_script(config, hosts(), SETTINGS)
    stand_in(tmp_path, "slipstream", f'echo "$@" >> {tmp_path}/began')
    stand_in(tmp_path, "srun", 'shift 2; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done')
    stand_in(tmp_path, "hostname", "echo 10.0.0.1 fe80::1")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007"}
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=DEADLINE_S)
    own = "weights.host=10.0.0.1 learner.rendezvous=10.0.0.1:20007"
    assert (tmp_path / "began").read_text().splitlines() == [
        f"learner {SETTINGS} {own} learner.host_rank={number}" for number in range(2)
    ]


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"slurm"}))
def test_other_engines_refuse_a_learner_on_several_hosts(engine: str) -> None:
    with pytest.raises(ConfigError, match=f"`learner.hosts` must be 1 on {engine}, got 2: only Slurm's scripts"):
        launch(configured("learner.hosts=2", "learner.ranks=2"), engine=engine, dry_run=True, options=hosts())


def test_hosts_without_the_gpus_of_a_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    eight = ["model.dtype=bfloat16", "learner.ranks=8", "actors.count=2"]
    for settings, options, complaint in (
        (
            eight,
            hosts(learner_gpus=0),
            "`--learner-gpus` must be at least 8, .* got 0; add --learner-gpus=8, or set model",
        ),
        (
            ["learner.ranks=8"],
            hosts(learner_gpus=4),
            "`--learner-gpus` must be at least 8, .* got 4; add --learner-gpus=8",
        ),
        (eight, hosts(learner_gpus=8, actor_gpus=0), "`--actor-gpus` must be at least 1 .* got 0; add --actor-gpus=2"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            launch(configured(*settings), engine="slurm", dry_run=True, options=options)
    for settings, options in (
        (eight, hosts(learner_gpus=8, actor_gpus=2)),
        ([*eight, "learner.hosts=2"], hosts(learner_gpus=4, actor_gpus=2)),
        (["learner.ranks=2"], hosts(learner_gpus=0, actor_gpus=0)),
        (eight, hosts(learner_gpus=0, actor_gpus=0, sbatch="--gres=gpu:8")),
    ):
        assert launch(configured(*settings), engine="slurm", dry_run=True, options=options) == 0


def test_every_launch_of_the_page_is_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # `main` changes it
    text = (REPOSITORY / "docs" / "fleet.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in re.findall(r"^slipstream launch .* conf/.*$", text, re.MULTILINE)]
    assert {command[1] for command in commands} == {"slurm", "kubernetes", "skypilot"}
    for command in commands:
        assert main([str(REPOSITORY / word) if word.startswith("conf/") else word for word in command]) == 0


@pytest.mark.parametrize(("code", "is_queued_again"), [(EXIT_PREEMPTED, True), (0, False), (1, False)])
def test_a_slurm_job_hands_its_signal_on_and_is_queued_again_only_if_it_left(
    tmp_path: Path, code: int, is_queued_again: bool
) -> None:
    """By a stand-in for slipstream, and one for Slurm's scontrol, on the PATH."""
    stand_in(
        tmp_path, "slipstream", f"trap 'exit {code}' TERM; echo $* > {tmp_path}/began; while true; do sleep 0.02; done"
    )
    stand_in(tmp_path, "scontrol", f"echo $* > {tmp_path}/queued")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", actors_script(configured(), hosts(), SETTINGS)], env=environment)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait(DEADLINE_S) == code
    began = (tmp_path / "began").read_text()
    assert began.startswith("actors redis.url=redis://redis:6379 run.name=Demo_1.x actors.transport=broadcast weights.")
    queued = tmp_path / "queued"
    assert (queued.read_text() if queued.exists() else "") == ("requeue 7\n" if is_queued_again else "")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dry_run_prints_everything_and_does_nothing(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ENGINES[engine](configured(), hosts(volume="s3://runs"))
    assert launch(configured(), engine=engine, dry_run=True, options=hosts(volume="s3://runs")) == 0
    said = capsys.readouterr().out
    for name, text in plan.files.items():
        assert f"{name}\n{text}" in said
    assert said.count("\n$ ") == len(plan.commands) > 0
    assert list(tmp_path.iterdir()) == []


def test_what_was_printed_is_written_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "sbatch", f'cat "$1" >> {tmp_path}/submitted; test ! -e {tmp_path}/refuses')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert launch(configured(), engine="slurm", dry_run=False, options=hosts()) == 0
    folder = tmp_path / "launch" / "Demo_1.x"
    written = [(folder / f"{verb}.sbatch").read_text() for verb in ("learner", "actors")]
    assert (tmp_path / "submitted").read_text() == "".join(written)
    assert str(folder / "config.yaml") in written[0] and str(folder / "config.yaml") not in written[1]
    assert load_config(str(folder / "config.yaml"), []) == configured()
    (tmp_path / "refuses").touch()
    assert launch(configured(), engine="slurm", dry_run=False, options=hosts()) == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="kubectl is not on this machine's PATH"):
        launch(configured(), engine="kubernetes", dry_run=False, options=hosts())


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
