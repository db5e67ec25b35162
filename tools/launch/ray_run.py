"""A run on a Ray cluster: the learner in a placement group, and each host of actors as a task that Ray can move.

    RAY_ADDRESS=... python -m slipstream.tools.launch.ray_run CONFIG.yaml ACTOR_HOSTS

The nodes need Slipstream installed. Only the learner's needs the folder of `run.root`. An autoscaling cluster adds
nodes for waiting tasks. Only this file needs `pip install ray`.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import redis
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect, without_password
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import EXIT_PREEMPTED, LEAVE_S, Shutdown
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.replay.fleet.fleet import Fleet
from slipstream.tools.launch.launch import gpus_of_actors, gpus_of_learner
from slipstream.tools.launch.scale import RAY
from slipstream.tools.run.child import Child

POLL_S = 0.5
GRACE_S = 60.0  # after the drain: the learner writes its checkpoint


class Left(RuntimeError):
    """The process was preempted, for example by a notice: Ray restarts the task on any available node."""


class Failed(RuntimeError):
    """The process failed too often to be restarted; the message has the end of its log."""


@ray.remote(max_retries=-1, retry_exceptions=[Left])  # type: ignore[untyped-decorator]
def run_process(verb: str, settings: str, secrets: dict[str, str], path: str) -> None:
    """Run `slipstream VERB` with the YAML text `settings` on this node until it is done. `path` is its PYTHONPATH.

    `secrets` are environment variables.

    When the task is cancelled, it sends SIGTERM to the process and waits for its end. When the node's Ray dies, so does
    this task, and the kernel sends SIGTERM to the process.
    """
    node = ray.get_runtime_context().get_node_id()[:8]
    # The publisher binds to it, and actors connect to it.
    own = [f"weights.host={ray.util.get_node_ip_address()}"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(settings)
        file.flush()
        config = load_config(file.name, [])
        if verb == "actors" and not os.access(config.run.root, os.W_OK):  # this node has no such folder for its logs
            config.run.root = str(Path(tempfile.gettempdir()) / "slipstream")
            own.append(f"run.root={config.run.root}")
        child = Child(
            f"{verb} on node {node}",
            [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", verb, file.name, *own],
            log=RunDir(config.run.root, config.run.name).log(f"ray-{verb}-{node}"),
            environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": path} | secrets,
        )
        try:
            child.start()
            while child.exit_code != 0:
                if child.exit_code == EXIT_PREEMPTED:
                    raise Left(child.name)
                if not child.keep_up():
                    ended = f"{child.name} ended with code {child.exit_code}; the last lines of {child.log}:"
                    raise Failed(f"{ended}\n{child.last_log_lines()}")
                time.sleep(POLL_S)
        finally:
            child.ask_to_end()
            child.wait(config.actors.drain_s + LEAVE_S + GRACE_S)


def run(config: Config, actor_hosts: int) -> int:
    """Start the learner and the actors, and supervise them until the learner is done; return the exit code."""
    config.run.root = str(Path(config.run.root).resolve())
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    shutdown = Shutdown()  # after ray.init, which installs its own handler of SIGTERM
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    secrets = {name: os.environ[name] for name in (PASSWORD_VARIABLE, KEY_VARIABLE) if name in os.environ}
    arguments = (dump_config(config), secrets, path)
    ranks, gpus = config.learner.ranks_per_host, gpus_of_learner(config)
    bundle = {"CPU": float(ranks)} | ({"GPU": float(gpus)} if gpus else {})
    learner = run_process.options(
        num_cpus=ranks,
        num_gpus=gpus,
        name=f"{config.run.name} learner",
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group([bundle], strategy="STRICT_PACK")),
    ).remote("learner", *arguments)
    actors = _Actors(
        lambda: run_process.options(
            num_cpus=max(config.actors.count, 1), num_gpus=gpus_of_actors(config), name=f"{config.run.name} actors"
        ).remote("actors", *arguments)
    )
    actors.want(actor_hosts)
    try:
        with connect(config.redis.url, patience_s=0) as client:
            fleet = Fleet(client, config.run.name)
            fleet.forget_wanted_actors(RAY)
            while not shutdown.requested.wait(POLL_S):
                if ray.wait([learner], timeout=0)[0]:
                    return _code_of(learner)
                actors.update(_wanted(fleet))
        return shutdown.exit_code
    finally:
        actors.want(0)
        ray.cancel(learner)
        ray.wait([learner, *actors.leaving], num_returns=1 + len(actors.leaving), timeout=GRACE_S)


class _Actors:
    """The Ray tasks that run actors."""

    def __init__(self, start: Callable[[], "ray.ObjectRef[None]"]) -> None:
        self._start = start
        self._tasks: list[ray.ObjectRef[None]] = []
        self.leaving: list[ray.ObjectRef[None]] = []

    def want(self, count: int) -> None:
        """Keep `count` tasks running from now on; surplus tasks, the newest first, are cancelled."""
        if count != len(self._tasks):
            print(f"changing the number of actor tasks from {len(self._tasks)} to {count}", flush=True)
        while len(self._tasks) < count:
            self._tasks.append(self._start())
        while len(self._tasks) > count:
            self.leaving.append(self._tasks.pop())
            ray.cancel(self.leaving[-1])

    def update(self, wanted: int | None) -> None:
        """Change the number of tasks to `wanted`, and print the error of each failed task; the others continue."""
        if wanted is not None:
            self.want(wanted)
        for task in ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)[0] if self._tasks else []:
            self._tasks.remove(task)
            _code_of(task)


def _code_of(task: "ray.ObjectRef[None]") -> int:
    """Return 0 if the ended task succeeded; print its error and return 1 if it failed."""
    try:
        ray.get(task)
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def _wanted(fleet: Fleet) -> int | None:
    try:
        return fleet.wanted_actors(RAY)
    except redis.RedisError:  # Redis is away for a moment: keep the number
        return None


def main() -> int:
    """Run with the configuration in a YAML file."""
    settings, actor_hosts = sys.argv[1:]
    config = load_config(settings, [])
    config.redis.url = without_password(config.redis.url)
    return run(config, int(actor_hosts))


if __name__ == "__main__":
    sys.exit(main())
