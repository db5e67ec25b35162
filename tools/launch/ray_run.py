"""A run on a Ray cluster: the learner in a placement group, each host of actors a task that Ray moves if its node goes.

    RAY_ADDRESS=... python -m tools.ray_run CONFIG.yaml

The nodes need Slipstream installed, and share the folder of `run.root`. A cluster that scales itself adds nodes for
tasks that wait. Needs `pip install ray`; nothing else in Slipstream does.
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

from common.config import Config, dump_config, load_config
from common.connection import PASSWORD_VARIABLE, connect, without_password
from common.run_dir import RunDir
from common.shutdown import EXIT_PREEMPTED, LEAVE_S, Shutdown
from replay.fleet import Fleet
from tools.child import Child
from tools.launch.scale import RAY

POLL_S = 0.5
GRACE_S = 60.0  # beyond the drain: a learner writes its checkpoint


class Left(RuntimeError):
    """The process was told to leave, as by a notice: Ray starts the task again, on whichever node there is."""


class Failed(RuntimeError):
    """The process failed for good; the message has its last words."""


@ray.remote(max_retries=-1, retry_exceptions=[Left])  # type: ignore[untyped-decorator]
def run_process(verb: str, settings: str, password: str | None, path: str) -> None:
    """`slipstream VERB` with the YAML `settings` on this node, until it is done. `path` is where code is looked for.

    Cancelled, it asks the process to leave and waits for that. When the node's Ray dies, so does this task, and the
    kernel asks the process to leave.
    """
    config, node = _configured(settings), ray.get_runtime_context().get_node_id()[:8]
    config.weights.host = ray.util.get_node_ip_address()  # where a learner's publisher binds, and actors find it
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": path}
    if password is not None:
        environment[PASSWORD_VARIABLE] = password
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        child = Child(
            f"{verb} on node {node}",
            [sys.executable, "-m", "tools.cli", verb, file.name],
            log=RunDir(config.run.root, config.run.name).log(f"ray-{verb}-{node}"),
            environment=environment,
        )
        try:
            child.start()
            while child.exit_code != 0:
                if child.exit_code == EXIT_PREEMPTED:
                    raise Left(child.name)
                if not child.keep_up():
                    raise Failed(f"{child.name} ended with {child.exit_code}; {child.log} ends:\n{child.last_words()}")
                time.sleep(POLL_S)
        finally:
            child.ask_to_end()
            child.wait(config.actors.drain_s + LEAVE_S + GRACE_S)


def run(config: Config) -> int:
    """Start everything and watch until the learner is done; return the exit code."""
    launch, config.run.root = config.launch, str(Path(config.run.root).resolve())
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    shutdown = Shutdown()  # behind Ray, which takes SIGTERM for itself
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    arguments = (dump_config(config), os.environ.get(PASSWORD_VARIABLE), path)
    bundle = {"CPU": float(launch.cpus)} | ({"GPU": float(launch.learner_gpus)} if launch.learner_gpus else {})
    learner = run_process.options(
        num_cpus=launch.cpus, num_gpus=launch.learner_gpus, name=f"{config.run.name} learner",
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group([bundle], strategy="STRICT_PACK")),
    ).remote("learner", *arguments)  # fmt: skip
    actors = _Actors(
        lambda: run_process.options(
            num_cpus=launch.cpus, num_gpus=launch.actor_gpus, name=f"{config.run.name} actors"
        ).remote("actors", *arguments)
    )  # fmt: skip
    actors.want(launch.actor_hosts)
    try:
        with connect(config.redis.url, patience_s=0) as client:
            fleet = Fleet(client, config.run.name)
            fleet.forget_wanted_actors(RAY)
            while not shutdown.requested.wait(POLL_S):
                if ray.wait([learner], timeout=0)[0]:
                    return _code_of(learner)
                actors.tend(_wanted(fleet))
        return shutdown.exit_code
    finally:
        actors.want(0)
        ray.cancel(learner)
        ray.wait([learner, *actors.leaving], num_returns=1 + len(actors.leaving), timeout=GRACE_S)


class _Actors:
    """The tasks that host actors."""

    def __init__(self, start: Callable[[], "ray.ObjectRef[None]"]) -> None:
        self._start = start
        self._tasks: list[ray.ObjectRef[None]] = []
        self.leaving: list[ray.ObjectRef[None]] = []

    def want(self, count: int) -> None:
        """Keep so many tasks from now on: the last ones are told to leave."""
        if count != len(self._tasks):
            print(f"{count} tasks of actors are wanted, {len(self._tasks)} were", flush=True)
        while len(self._tasks) < count:
            self._tasks.append(self._start())
        while len(self._tasks) > count:
            self.leaving.append(self._tasks.pop())
            ray.cancel(self.leaving[-1])

    def tend(self, wanted: int | None) -> None:
        """Say which have failed for good; the others go on."""
        if wanted is not None:
            self.want(wanted)
        for task in ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)[0] if self._tasks else []:
            self._tasks.remove(task)
            _code_of(task)


def _code_of(task: "ray.ObjectRef[None]") -> int:
    """0 where it is done, 1 where it failed for good, which is said."""
    try:
        ray.get(task)
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def _wanted(fleet: Fleet) -> int | None:
    try:
        return fleet.wanted_actors(RAY)
    except redis.RedisError:  # away for a moment: as many as before
        return None


def _configured(settings: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(settings)
        file.flush()
        return load_config(file.name, [])


def main(settings: str) -> int:
    """Run as the YAML file says."""
    config = load_config(settings, [])
    config.redis.url = without_password(config.redis.url)
    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
