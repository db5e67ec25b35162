"""A run on a Ray cluster of three nodes, on this machine: `make test-engines` installs Ray and runs it."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.replay.server.redis_server import Server
from slipstream.tools.launch.ray_run import NAMESPACE
from slipstream.tools.launch.scale import RAY, scale
from tests.processes import GUESS, REPOSITORY, Run, nothing_runs

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

GROUPS_PER_STEP = 4


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three nodes of one CPU each, so that each has room for one process of the run."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(1200)
def test_a_fleet_grows_and_shrinks_by_ray_and_goes_on_when_a_node_is_removed(
    cluster: Any, redis_server: Server, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*GUESS, "env.options={step_s: 0.1}", "learner.steps=100000", "learner.checkpoint_every=100000"]
    settings += ["replay.lease_ttl_s=6", "replay.max_lag=1000", "actors.transport=pull", "actors.drain_s=1"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        here = [f"run.name={run_id}", f"run.root={tmp_path}", f"redis.url={redis_server.url}"]
        config = load_config(None, [*here, *settings])
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.setenv(PASSWORD_VARIABLE, redis_server.password)  # `scale` asks in this process
        driver = run.start("driver", ["-m", "slipstream.tools.launch.ray_run", str(file), "2"])
        both_serve = "both actors serve, on two nodes"  # Ray's own processes start first, on the same cores
        run.wait_until(lambda: run.last_step() >= 2 and len(nodes_of(run)) == 2, both_serve, deadline_s=600.0)
        ray.init(cluster.address, namespace=NAMESPACE)
        assert set(ray.util.list_named_actors()) == {f"{run_id}/{name}" for name in ("learner", "actors-0", "actors-1")}

        first, (of_learner,) = nodes_of(run), run.dir.path.glob("logs/ray-learner-*.log")
        assert of_learner.stem.removeprefix("ray-learner-") not in first
        removed = next(node for node in cluster.worker_nodes if node.node_id[:8] in first)
        before = run.last_step()
        cluster.remove_node(removed, allow_graceful=False)
        run.wait_until(lambda: nodes_of(run) == first - {removed.node_id[:8]}, "its actor is gone")
        run.wait_until(lambda: run.last_step() >= max(before, 2) + 3, "the learner steps on without it")

        added = cluster.add_node(num_cpus=2)
        run.wait_until(lambda: added.node_id[:8] in nodes_of(run), "an actor serves on the node that was added")
        assert scale(config, to=3, host=RAY) == 0
        run.wait_until(lambda: len(run.fleet.members()) == 3, "a third actor serves")
        assert f"{run_id}/actors-2" in ray.util.list_named_actors()
        ray.kill(ray.get_actor(f"{run_id}/actors-0"))
        ray.get_actor(f"{run_id}/actors-2").leave.remote()
        left = {f"{run_id}/learner", f"{run_id}/actors-1"}
        run.wait_until(lambda: set(ray.util.list_named_actors()) == left, "one is killed, one has left")
        assert len(run.fleet.members()) == 1
        after = run.last_step()
        run.wait_until(lambda: run.last_step() >= after + 3, "the learner steps on with one")
        assert scale(config, to=2, host=RAY) == 0
        run.wait_until(lambda: f"{run_id}/actors-3" in ray.util.list_named_actors(), "a new one is made")

        driver.send(signal.SIGTERM)
        assert driver.wait() == EXIT_PREEMPTED
        run.wait_until(lambda: nothing_runs(run_id), "every process is gone", deadline_s=60)
        ledger = run.ledger()
        assert ledger.balanced and run.audit() == []
        assert ledger.trained == GROUPS_PER_STEP * run.last_step() and ledger.leased == 0


def nodes_of(run: Run) -> set[str]:
    """The first letters of the ids of the nodes whose actors are alive."""
    names, logs = {member.name for member in run.fleet.members()}, run.dir.path.glob("logs/ray-actors-*.log")
    return {log.stem.rpartition("-")[2] for log in logs if any(name + ":" in log.read_text() for name in names)}
