"""`slipstream launch`: what is written for Kubernetes, Slurm, SkyPilot and Ray is what each of them takes."""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.replay.server.redis_server import find_executable
from slipstream.tools.cli.cli import main
from slipstream.tools.launch.launch import OURS, TEMPLATES, launch, resource_name, run_commands, run_files
from slipstream.tools.run.child import EXIT_BAD_INPUT
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 60.0
FOLDER = Path("/shared/launch/demo")
NAMED = "slipstream-demo-1-x-25db0e8f"
ODD = """it's "1" $(id) {{run}}"""

# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run", "config"}
SKY_RESOURCES = {"infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot"}
SKY_RESOURCES |= {"disk_size", "disk_tier", "network_tier", "image_id", "ports", "labels", "autostop", "any_of"}
SKY_RESOURCES |= {"ordered", "job_recovery"}
# https://slurm.schedmd.com/sbatch.html, of those that take a value and that this program writes
SBATCH_OPTIONS = {"--job-name", "--nodes", "--ntasks", "--cpus-per-task", "--mem", "--gpus-per-node", "--open-mode"}
SBATCH_OPTIONS |= {"--output", "--signal", "--array", "--partition"}
GPUS = ["model.dtype=bfloat16", "learner.ranks=4", "actors.tensor_parallel=2"]


def configured(*settings: str) -> Config:
    return load_config(None, ["run.name=Demo_1.x", "run.root=/shared/runs", "redis.url=redis://redis:6379", *settings])


def written(name: str, config: Config) -> str:
    (engine,) = [engine for engine, names in TEMPLATES.items() if name in names]
    return run_files(config, engine, FOLDER, 3)[name]


def objects(config: Config) -> dict[tuple[str, str], dict[str, Any]]:
    made = yaml.safe_load_all(written("kubernetes.yaml", config))
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def test_kubernetes_gets_a_learner_and_any_number_of_actors_that_may_be_preempted() -> None:
    made = objects(configured(*GPUS))
    assert made.keys() == {("ConfigMap", f"{NAMED}-settings"), ("Job", f"{NAMED}-learner"), ("Job", f"{NAMED}-actors")}
    actors, learner = (made["Job", f"{NAMED}-{verb}"]["spec"] for verb in ("actors", "learner"))
    assert (learner["parallelism"], learner["completions"], actors["parallelism"]) == (1, 1, 3)
    assert "completions" not in actors
    for spec, gpus, grace_s in ((learner, "4", 600), (actors, "2", 20)):
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == grace_s
        for action, code in (("Ignore", EXIT_PREEMPTED), ("FailJob", EXIT_BAD_INPUT)):
            codes = {"containerName": container["name"], "operator": "In", "values": [code]}
            assert {"action": action, "onExitCodes": codes} in spec["podFailurePolicy"]["rules"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    settings = made["ConfigMap", f"{NAMED}-settings"]["data"]["config.yaml"]
    assert yaml.safe_load(settings)["redis"]["url"] == "redis://redis:6379"


def test_what_differs_on_a_cluster_is_a_patch_of_the_objects() -> None:
    """`make test-engines` merges it with kubectl."""
    patch, merging = (yaml.safe_load(written(name, configured())) for name in ("patch.yaml", "kustomization.yaml"))
    assert patch["metadata"]["labels"].keys() == {"kueue.x-k8s.io/queue-name"}
    assert patch["spec"]["template"]["spec"].keys() == {"serviceAccountName", "nodeSelector", "tolerations"}
    assert merging["resources"] == ["kubernetes.yaml"] and merging["images"][0]["name"] == "slipstream"
    assert merging["patches"] == [{"path": "patch.yaml", "target": {"kind": patch["kind"]}}]


def test_the_services_of_compose_are_commands_of_ours_and_a_redis_that_evicts_nothing(tmp_path: Path) -> None:
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    assert services.keys() == {"redis", "learner", "actors"}
    for verb in ("learner", "actors"):
        program, *words = services[verb]["command"]
        assert (program, words[0], services[verb]["image"]) == ("slipstream", verb, "slipstream")
        assert {"run.name=demo", "redis.url=redis://redis:6379"} <= set(words)
        assert main([*words, "--print-config"]) == 0
    _, *options = services["redis"]["command"]
    path = f"{tmp_path}/redis.sock"
    server = subprocess.Popen([find_executable(), "--port", "0", "--unixsocket", path, *options], cwd=tmp_path)
    try:
        with connect(f"unix://{path}", patience_s=DEADLINE_S) as client:
            wanted = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
            assert {key: client.config_get(key)[key] for key in wanted} == wanted
    finally:
        server.kill()
        server.wait()


def test_objects_of_runs_whose_names_are_alike_to_kubernetes_are_not_the_same() -> None:
    """The second one would take the first one's settings, which its learner reads when its pod is made again."""
    long = "tools_qwen3-8b_gspo_lr1e-6_temperature1_seed"
    names = ["demo", "Demo", "demo-1", "demo_1", "demo.1", "demo-1-", f"{long}1", f"{long}2", "x" * 64]
    made = [resource_name(name) for name in names]
    assert len(set(made)) == len(names) and made[0] == "slipstream-demo"
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-settings") < 64 for name in made)


@pytest.mark.parametrize("verb", ["learner", "actors"])
def test_skypilot_gets_keys_that_it_knows(verb: str) -> None:
    made = yaml.safe_load(written(f"{verb}.sky.yaml", configured(*GPUS)))
    assert set(made) <= SKY_KEYS and set(made["resources"]) <= SKY_RESOURCES
    assert made["resources"]["accelerators"] == ("H100:4" if verb == "learner" else "H100:2")
    assert made["resources"]["use_spot"] is (verb == "actors")
    mounts = {"~/slipstream.yaml": str(FOLDER / "config.yaml")}
    mounts |= {"/shared/runs": {"source": "s3://slipstream-runs", "mode": "MOUNT"}}
    assert made.get("file_mounts") == (mounts if verb == "learner" else None)
    assert made["secrets"] == {"SLIPSTREAM_REDIS_PASSWORD": None}
    assert ("actors.instance_kind=spot" in made["run"]) is (verb == "actors")


def test_hosts_of_actors_need_no_volume_and_no_file_and_get_their_own_settings() -> None:
    """The settings that the command has are those of `actors` that the run's configuration has changed."""
    own = ["actors.max_episodes=64", "actors.drain_s=20", f"actors.notices=aws@http://{ODD}"]
    config = configured(*own, "optim.lr=1e-5")
    pod = objects(config)["Job", f"{NAMED}-actors"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["memory"]
    scripts = [
        shlex.join(["slipstream", "actors", *pod["containers"][0]["args"]]),
        yaml.safe_load(written("actors.sky.yaml", config))["run"],
        written("actors.sbatch", config),
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
        (container,) = objects(config)["Job", f"{NAMED}-{verb}"]["spec"]["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "slipstream-redis", "optional": True}}]
        made = yaml.safe_load(written(f"{verb}.sky.yaml", config))
        assert made["secrets"] == {PASSWORD_VARIABLE: None, KEY_VARIABLE: None}
    assert f"{PASSWORD_VARIABLE} and {KEY_VARIABLE}" in written("kubernetes.yaml", config).replace("\n# ", " ")
    (command, *_) = run_commands(config, "skypilot", FOLDER, 3)
    assert command[5:9] == ["--secret", PASSWORD_VARIABLE, "--secret", KEY_VARIABLE]


def test_paths_are_quoted_for_where_they_stand() -> None:
    config = configured('run.root="/my runs/a: #b"')
    folder = Path("/my folder/$(id)")
    task = yaml.safe_load(run_files(config, "skypilot", folder, 1)["learner.sky.yaml"])
    assert task["file_mounts"].keys() == {"~/slipstream.yaml", "/my runs/a: #b"}
    assert task["file_mounts"]["~/slipstream.yaml"] == f"{folder}/config.yaml"
    pod = objects(config)["Job", f"{NAMED}-learner"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["volumeMounts"][-1] == {"name": "run", "mountPath": "/my runs/a: #b"}
    script = run_files(config, "slurm", folder, 1)["learner.sbatch"]
    (line,) = [line for line in script.splitlines() if "  slipstream learner" in line]
    assert shlex.split(line)[2] == f"{folder}/config.yaml"


def test_what_an_engine_cannot_use_is_refused() -> None:
    for engine in ("kubernetes", "skypilot"):
        with pytest.raises(ConfigError, match=f"`run.root` must be an absolute path on {engine}, got 'runs'"):
            launch(configured("run.root=runs"), engine=engine, actor_hosts=3, dry_run=True)
    for engine in TEMPLATES.keys() - {"slurm"}:
        with pytest.raises(ConfigError, match=f"`learner.hosts` must be 1 on {engine}, got 2: only Slurm's scripts"):
            launch(configured("learner.hosts=2", "learner.ranks=2"), engine=engine, actor_hosts=3, dry_run=True)
    with pytest.raises(ConfigError, match="`--actor-hosts` must be >= 1, got 0"):
        launch(configured(), engine="ray", actor_hosts=0, dry_run=True)
    config = configured()
    config.actors.notices = "a\nb"
    with pytest.raises(ConfigError, match="`actors` must be printable text on one line"):
        launch(config, engine="slurm", actor_hosts=3, dry_run=True)


@pytest.mark.parametrize("verb", ["learner", "actors"])
def test_slurm_gets_options_that_it_knows_and_a_script_that_bash_reads(verb: str) -> None:
    script = written(f"{verb}.sbatch", configured(*GPUS))
    head, *_ = script.split("\n\n")
    options = [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH")]
    assert script.startswith("#!/bin/bash\n") and script.count("#SBATCH") == len(options)
    assert {option.partition("=")[0] for option in options if "=" in option} <= SBATCH_OPTIONS
    assert [option for option in options if "=" not in option] == ["--requeue"]
    assert "--signal=B:TERM@60" in options and f"--gpus-per-node={4 if verb == 'learner' else 2}" in options
    assert ("--array=1-3" in options) is (verb == "actors")
    assert f"$code -eq {EXIT_PREEMPTED} " in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_learner_on_several_hosts_is_a_slurm_job_of_as_many_nodes(tmp_path: Path) -> None:
    """By stand-ins for slipstream and for Slurm's srun, which starts its command once for each node."""
    config = configured("learner.hosts=2", "learner.ranks=4")
    script = written("learner.sbatch", config)
    assert "#SBATCH --nodes=2" in script and "#SBATCH --ntasks=2" in script
    assert "#SBATCH --nodes=1" in written("actors.sbatch", config)
    stand_in(tmp_path, "slipstream", f'echo "$@" >> {tmp_path}/began')
    stand_in(tmp_path, "srun", 'shift 2; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007"}
    environment |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}  # of the node on which srun runs
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=DEADLINE_S)
    assert (tmp_path / "began").read_text().splitlines() == [
        f"learner {FOLDER}/config.yaml weights.host=auto learner.host_rank={number} learner.rendezvous=10.0.0.1:20007"
        for number in range(2)
    ]


def test_hosts_have_gpus_if_the_model_is_for_them() -> None:
    names = [name for files in TEMPLATES.values() for name in files if name not in ("patch.yaml", "kustomization.yaml")]
    for settings, asks in (([], False), (["learner.ranks=8"], False), (GPUS, True)):
        config = configured(*settings)
        for name in names:
            text = written(name, config)
            assert bool(re.search(r"nvidia.com/gpu|accelerators|--gpus-per-node", text)) is asks
    two_hosts = configured("model.dtype=bfloat16", "learner.hosts=2", "learner.ranks=8")
    assert "#SBATCH --gpus-per-node=4" in written("learner.sbatch", two_hosts)


def test_each_launch_of_the_page_works() -> None:
    text = (REPOSITORY / "docs" / "fleet.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in re.findall(r"^slipstream launch .* conf/.*$", text, re.MULTILINE)]
    assert {command[1] for command in commands} == {"slurm", "kubernetes", "skypilot"}
    for command in commands:
        assert main([str(REPOSITORY / word) if word.startswith("conf/") else word for word in command]) == 0


@pytest.mark.parametrize(("code", "is_queued_again"), [(EXIT_PREEMPTED, True), (0, False), (1, False)])
def test_a_slurm_job_hands_its_signal_on_and_is_queued_again(tmp_path: Path, code: int, is_queued_again: bool) -> None:
    """By a stand-in for slipstream, and one for Slurm's scontrol, on the PATH."""
    waits = f"trap 'exit {code}' TERM; echo $* > {tmp_path}/began; while true; do sleep 0.02; done"
    stand_in(tmp_path, "slipstream", waits)
    stand_in(tmp_path, "scontrol", f"echo $* > {tmp_path}/queued")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", written("actors.sbatch", configured())], env=environment)
    wait_until((tmp_path / "began").exists, "the job to begin")
    job.send_signal(signal.SIGTERM)
    assert job.wait(DEADLINE_S) == code
    began = (tmp_path / "began").read_text()
    assert began.startswith("actors redis.url=redis://redis:6379 run.name=Demo_1.x actors.transport=broadcast weights.")
    queued = tmp_path / "queued"
    assert (queued.read_text() if queued.exists() else "") == ("requeue 7\n" if is_queued_again else "")


@pytest.mark.parametrize("engine", TEMPLATES)
def test_a_dry_run_prints_everything_and_does_nothing(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "launch" / "Demo_1.x"
    assert launch(configured(), engine=engine, actor_hosts=3, dry_run=True) == 0
    said = capsys.readouterr().out
    for name, text in run_files(configured(), engine, folder, 3).items():
        assert f"{folder / name}\n{text}" in said
    assert said.count("\n$ ") == len(run_commands(configured(), engine, folder, 3)) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_templates_are_the_users_own_from_the_first_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"wrote launch/learner.sbatch and launch/actors.sbatch: .* launch again"):
        launch(configured(), engine="slurm", actor_hosts=3, dry_run=False)
    assert sorted(path.name for path in (tmp_path / "launch").iterdir()) == ["actors.sbatch", "learner.sbatch"]
    own = tmp_path / "launch" / "actors.sbatch"
    own.write_text("#SBATCH --partition=spot\n#SBATCH --gpus-per-node=h100:{{actor_gpus}}\nslipstream {{run}}\n")
    assert written("actors.sbatch", configured()) == "#SBATCH --partition=spot\nslipstream Demo_1.x\n"
    assert "--gpus-per-node=h100:2\n" in written("actors.sbatch", configured(*GPUS))
    for text, complaint in (
        (b"{{image}}", r"launch/actors.sbatch has \{\{image\}\}, which is no value .* actor_gpus, "),
        (b"# f\xfcr uns", r"launch/actors.sbatch is not in UTF-8: .*; save it in UTF-8"),
    ):
        own.write_bytes(text)
        with pytest.raises(ConfigError, match=complaint):
            written("actors.sbatch", configured())


def test_what_was_printed_is_written_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "sbatch", f'cat "$1" >> {tmp_path}/submitted; test ! -e {tmp_path}/refuses')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(OURS, tmp_path / "launch")
    assert launch(configured(), engine="slurm", actor_hosts=3, dry_run=False) == 0
    folder = tmp_path / "launch" / "Demo_1.x"
    scripts = [(folder / f"{verb}.sbatch").read_text() for verb in ("learner", "actors")]
    assert (tmp_path / "submitted").read_text() == "".join(scripts)
    assert f"{folder}/config.yaml" in scripts[0] and f"{folder}/config.yaml" not in scripts[1]
    assert load_config(str(folder / "config.yaml"), []) == configured()
    (tmp_path / "refuses").touch()
    assert launch(configured(), engine="slurm", actor_hosts=3, dry_run=False) == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="the package ray is not installed here; run pip install ray"):
        launch(configured(), engine="ray", actor_hosts=3, dry_run=False)
    with pytest.raises(ConfigError, match="kubectl is not on this machine's PATH"):
        launch(configured(), engine="kubernetes", actor_hosts=3, dry_run=False)


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
