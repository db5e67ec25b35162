"""A whole run over Redis: the learner on the device, an actor with a scripted engine, and the books at the end."""

import math
import sys
import tempfile
import time
from pathlib import Path

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.replay.buffer.audit import audit
from slipstream.replay.server.server import start_private_server
from slipstream.tools.cli import cli  # noqa: F401  of the learner's process: a package that it lacks is named here
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.run.child import Child

NAME, NUM_STEPS = "gpu-check", 3
LIMIT_S = {"cuda": 100.0, "cpu": 400.0}
SETTINGS = (
    f"run.name={NAME}",
    f"learner.steps={NUM_STEPS}",
    "learner.checkpoint_every=2",
    "warm_start.episodes=0",
    "eval.num_tasks=0",
    "replay.groups_per_step=2",
    "replay.group_size=4",
    "objective.guard_min_ess=0",
    "objective.guard_max_ratio=0",
    "objective.max_negative_kl=0",
    "actors.count=1",
    "actors.max_episodes=8",
    "actors.drain_s=0",
)


def check(findings: Findings, device: str) -> None:
    """Run until the learner has finished, as `slipstream up` would."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as root:
        config = load_config(
            "conf/quickstart.yaml",
            [*SETTINGS, f"run.root={root}"],
            presets=["conf/objective/reinforce_pp.yaml"],  # it drops no group for equal returns
        )
        run_dir = RunDir(Path(root), NAME)
        run_dir.create()
        with start_private_server(run_dir.redis) as server:
            config.redis.url = server.url
            write_whole(run_dir.config, dump_config(config))
            _play(findings, config, run_dir, password=server.password, limit_s=LIMIT_S[device])
            wrong = audit(connect(server.secret_url), NAME)
            findings.require("the books balance", not wrong, "; ".join(wrong)[:300])
        _judge(findings, run_dir, device)


def _play(findings: Findings, config: Config, run_dir: RunDir, *, password: str, limit_s: float) -> None:
    environment, path = {PASSWORD_VARIABLE: password}, str(run_dir.config)
    learner = _child("learner", ["slipstream.tools.cli.cli", "learner", path], run_dir, environment)
    actor = _child("actor", ["slipstream.tools.lab.gpu_check.scripted_actor", "actor", path], run_dir, environment)
    started = time.monotonic()
    try:
        while learner.exit_code is None and time.monotonic() - started < limit_s:
            time.sleep(0.1)
        if learner.exit_code != 0:
            print(learner.last_log_lines(), actor.last_log_lines(), sep="\n--- actor:\n")
        findings.require("the learner finished the run", learner.exit_code == 0, f"exit code {learner.exit_code}")
        findings.note("the run took", time.monotonic() - started, "s")
    finally:
        actor.kill()
        learner.kill()


def _child(name: str, command: list[str], run_dir: RunDir, environment: dict[str, str]) -> Child:
    child = Child(name, [sys.executable, "-P", "-m", *command], log=run_dir.log(name), environment=environment)
    child.start()
    return child


def _judge(findings: Findings, run_dir: RunDir, device: str) -> None:
    records = list(read_metrics(run_dir.metrics))
    findings.require("every step was recorded", len(records) == NUM_STEPS, str(len(records)))
    norms = [float(record["optim/grad_norm"]) for record in records]
    findings.require("every gradient is finite and not 0", all(0 < norm < math.inf for norm in norms), str(norms))
    named = [line for line in run_dir.log("learner").read_text().splitlines() if "attention in " in line]
    findings.require(f"the learner was on {device}", any(f" on {device}:" in line for line in named))
    findings.note("the learner's log", named[0] if named else "no line about attention")
