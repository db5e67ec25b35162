"""The loop to read and the system have the same losses, where no policy is ever old."""

from pathlib import Path

import pytest

from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, Run, python

NUM_STEPS = 6
SETTINGS = [*GUESS, "replay.target_lag=0", "replay.max_lag=0", "replay.drop_zero_variance=false"]
# An attempt that is made again has another seed.
SETTINGS += ["replay.lease_ttl_s=300", f"learner.steps={NUM_STEPS}"]


@pytest.mark.timeout(1200)
def test_the_loop_to_read_has_the_systems_losses_bit_for_bit(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    with Run(run_id, root=tmp_path, server=redis_server, settings=SETTINGS) as run:
        processes = [run.start_learner(), run.start_actor("actor")]
        assert [process.wait() for process in processes] == [0, 0]
        of_system = [record["optim/loss"] for record in run.step_records()]
        assert len(of_system) == NUM_STEPS and len(set(of_system)) == NUM_STEPS
    (config := tmp_path / "empty.yaml").write_text("{}")
    model = f"model.path={tmp_path / run_id / 'model'}"
    done = python("-m", "slipstream.learner.loop", str(config), *SETTINGS, model, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()] == of_system
