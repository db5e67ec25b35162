"""The loop to read and the system have the same losses, where no policy is ever old."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, REPOSITORY, Run

NUM_STEPS = 6
SETTINGS = [
    *GUESS,
    "replay.target_lag=0",
    "replay.max_lag=0",
    "replay.lease_ttl_s=300",  # an attempt that is made again has another seed
    "replay.drop_zero_variance=false",
    f"learner.steps={NUM_STEPS}",
]


@pytest.mark.timeout(1200)
def test_the_loop_to_read_has_the_losses_of_the_system_to_the_last_bit(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    with Run(run_id, root=tmp_path, server=redis_server, settings=SETTINGS) as run:
        processes = [run.start_learner(), run.start_actor("actor")]
        assert [process.wait() for process in processes] == [0, 0]
        of_system = [record["optim/loss"] for record in run.step_records()]
        assert len(of_system) == NUM_STEPS and len(set(of_system)) == NUM_STEPS
        of_loop = losses_of_loop(tmp_path, SETTINGS, model=tmp_path / run_id / "model")
    assert of_loop == of_system


def losses_of_loop(folder: Path, settings: list[str], *, model: Path) -> list[float]:
    """What `slipstream.learner.loop` prints in a process of its own."""
    config = folder / "empty.yaml"
    config.write_text("{}")
    command = [sys.executable, "-m", "slipstream.learner.loop", str(config), *settings, f"model.path={model}"]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
