"""A run on a Ray cluster: the learner and each actor process is a Ray actor, which Ray starts again on another node.

    RAY_ADDRESS=... python -m slipstream.tools.launch.ray_run CONFIG.yaml ACTOR_HOSTS

The nodes need Slipstream installed. Only the learner's needs the folder of `run.root`. An autoscaling cluster adds
nodes for waiting Ray actors. Only this file needs `pip install ray`.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import redis

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE, connect, without_password
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import EXIT_PREEMPTED, LEAVE_S, Shutdown
from slipstream.common.transfer.encryption import KEY_VARIABLE
from slipstream.replay.fleet.fleet import Fleet
from slipstream.tools.launch.launch import gpus_of_actors, gpus_of_learner
from slipstream.tools.launch.scale import RAY
from slipstream.tools.run.child import LEARNER_GRACE_S, Child, verb_command

NAMESPACE = "slipstream"  # of the Ray actors, which are named RUN/learner, RUN/actors-0, RUN/actors-1, ...
POLL_S = 0.5
ASKED_S = 5.0  # for a Ray actor to hear that it has to leave


class Process:
    """`slipstream VERB` on one node. If the node or this Ray actor is lost, Ray makes it again where there is room."""

    def __init__(self) -> None:
        self._leaves = threading.Event()

    def run(self, name: str, config: Config, secrets: dict[str, str], path: str) -> None:
        """Run the process until it is done or has to leave: then it drains. Raises RuntimeError if it failed too often.

        `name` is the verb, and a number. `secrets` are environment variables, `path` is its PYTHONPATH.
        """
        verb, node = name.partition("-")[0], ray.get_runtime_context().get_node_id()[:8]
        if verb == "actors" and not os.access(config.run.root, os.W_OK):  # this node has no such folder for its logs
            config.run.root = str(Path(tempfile.gettempdir()) / "slipstream")
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
            file.write(dump_config(config))
            file.flush()
            child = Child(
                f"{name} on node {node}",
                verb_command(verb, file.name),
                log=RunDir(config.run.root, config.run.name).log(f"ray-{name}-{node}"),
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": path} | secrets,
            )
            child.start()
            while child.exit_code != 0 and not self._leaves.wait(POLL_S):
                if child.exit_code == EXIT_PREEMPTED:  # by a notice, for example: Ray makes this actor again elsewhere
                    os._exit(EXIT_PREEMPTED)
                if not child.keep_up():
                    ended = f"{child.name} ended with code {child.exit_code}; the last lines of {child.log}:"
                    raise RuntimeError(f"{ended}\n{child.last_log_lines()}")
            child.end(config.actors.drain_s + LEAVE_S + LEARNER_GRACE_S)

    def leave(self) -> None:
        """Make `run` end its process, and return."""
        self._leaves.set()


AsRayActor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=2)(Process)


def run(config: Config, actor_hosts: int) -> int:
    """Start the learner and the actors, and supervise them until the learner is done; return the exit code."""
    config.run.root, config.weights.host = str(Path(config.run.root).resolve()), "auto"
    num_actors, config.actors.count = actor_hosts * max(config.actors.count, 1), 1
    config.actors.join_timeout_s = 1e6  # the learner may have to wait for a node, and if it ends, this ends its actors
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace=NAMESPACE, log_to_driver=False)
    shutdown = Shutdown()  # after ray.init, which installs its own handler of SIGTERM
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    secrets = {name: os.environ[name] for name in (PASSWORD_VARIABLE, KEY_VARIABLE) if name in os.environ}

    def start(name: str, num_cpus: int, num_gpus: int) -> tuple[Any, Any]:
        options = {"name": f"{config.run.name}/{name}", "num_cpus": num_cpus, "num_gpus": num_gpus}
        process = AsRayActor.options(**options).remote()
        return process.run.remote(name, config, secrets, path), process

    learning, learner = start("learner", config.learner.ranks_per_host, gpus_of_learner(config))
    actors = _Actors(lambda number: start(f"actors-{number}", 1, gpus_of_actors(config)))
    actors.want(num_actors)
    try:
        with connect(config.redis.url, patience_s=0) as client:
            fleet = Fleet(client, config.run.name)
            fleet.forget_wanted_actors(RAY)
            while not shutdown.requested.wait(POLL_S):
                if ray.wait([learning], timeout=0)[0]:
                    return _code_of(learning)
                with contextlib.suppress(redis.RedisError):  # Redis is away for a moment: keep the number
                    actors.update(fleet.wanted_actors(RAY))
        return shutdown.exit_code
    finally:
        actors.want(0)
        learner.leave.remote()
        calls = [learning, *actors.leaving()]
        ray.wait(calls, num_returns=len(calls), timeout=LEARNER_GRACE_S)


class _Actors:
    """The Ray actors that run one actor each, by their calls of `run`."""

    def __init__(self, start: Callable[[int], tuple[Any, Any]]) -> None:
        self._start = start
        self._num_started, self._wanted = 0, 0
        self._running: dict[Any, Any] = {}
        self._leaving: dict[Any, tuple[Any, Any]] = {}  # Ray ends an actor without a reference to it

    def want(self, count: int) -> None:
        """Have `count` of them: start further ones, or let surplus ones leave, the newest first."""
        print(f"changing the number of actors from {len(self._running)} to {count}", flush=True)
        self._wanted = count
        while len(self._running) < count:
            call, actor = self._start(self._num_started)
            self._running[call] = actor
            self._num_started += 1
        while len(self._running) > count:
            call, actor = self._running.popitem()
            self._leaving[actor.leave.remote()] = call, actor

    def leaving(self) -> list[Any]:
        """The calls of those that leave, without the ones that still wait for a node."""
        asked = ray.wait([*self._leaving], num_returns=len(self._leaving), timeout=ASKED_S)[0] if self._leaving else []
        return [self._leaving[each][0] for each in asked]

    def update(self, wanted: int | None) -> None:
        """Follow a new number. Forget each that failed, that left or that `ray.kill` ended, and print why."""
        if wanted not in (None, self._wanted):
            self.want(wanted)
        for call in ray.wait([*self._running], num_returns=len(self._running), timeout=0)[0] if self._running else []:
            del self._running[call]
            _code_of(call)


def _code_of(call: Any) -> int:
    """Return 0 if the call that has returned succeeded; print its error and return 1 if it failed."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


def main() -> int:
    settings, actor_hosts = sys.argv[1:]
    config = load_config(settings, [])
    config.redis.url = without_password(config.redis.url)
    return run(config, int(actor_hosts))


if __name__ == "__main__":
    sys.exit(main())
