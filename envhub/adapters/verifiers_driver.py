"""Plays episodes of one environment of `verifiers`, as it is told: a program for the Python that has that package.

Nothing of ours is imported here, and nothing of theirs anywhere else. Orders come on stdin and news go to stdout, one
JSON object a line; the first order says what is played, the others are `run` and `cancel`. The end of stdin is the end:
whoever gave the orders is gone.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import harness_class, load_environment, load_taskset, resolve_env_config

MODEL = "policy"
SECRET_VARIABLE = "SLIPSTREAM_API_KEY"  # verifiers hands no variable with API_KEY in its name on to programs
HELD_OUT_SHARE = 8  # one task in so many, where the taskset has no split of its own
END_S = 5.0  # for what is running to be cleared away
CONTEXT_FULL = "maximum context length"  # what their renderer says of a prompt that is too long, and our server

Order = dict[str, Any]


class Tasks:
    """The tasks of a split, read from their taskset as far as they are asked for, and used over and over."""

    def __init__(self, tasks: Iterator[vf.Task], belongs: Callable[[vf.Task], bool]) -> None:
        self._source = tasks
        self._belongs = belongs
        self._found: list[vf.Task] = []
        self._reading = threading.Lock()

    def at(self, index: int) -> vf.Task:
        with self._reading:
            while index >= len(self._found) and (task := next(self._source, None)) is not None:
                if self._belongs(task):
                    self._found.append(task)
        if not self._found:
            raise ValueError("the split has no tasks; name another taskset for it in `env.options.held_out`")
        return self._found[index % len(self._found)]


class Driver:
    """One environment, and the episodes that run in it. Those of the policy ask at `url`, by the episode's name."""

    def __init__(self, settings: Order, tell: Callable[[Order], None]) -> None:
        """Raises whatever verifiers does of a configuration that it does not take."""
        self._tell = tell
        config, self._role = with_policy(resolve_env_config(settings["config"]), max_turns=settings["max_turns"])
        self.env = load_environment(config)
        self._tasks = splits(self.env, settings["held_out"])
        self._client = vf.TrainClientConfig(
            base_url=f"{settings['url']}/v1",
            api_key_var=SECRET_VARIABLE,
            renderer=settings["renderer"],
            renderer_model_name=settings["model_folder"],
        )
        self._running: dict[str, asyncio.Task[None]] = {}

    def obey(self, order: Order) -> None:
        if "cancel" in order:
            if order["cancel"] in self._running:
                self._running[order["cancel"]].cancel()
            return
        name = order["run"]
        self._running[name] = asyncio.create_task(self._run(order))
        self._running[name].add_done_callback(lambda _: self._running.pop(name))

    async def end(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, order: Order) -> None:
        try:
            self._tell({"ended": order["run"], **await self._play(order)})
        except Exception as error:
            self._tell({"ended": order["run"], "errors": [f"{type(error).__name__}: {error}"]})

    async def _play(self, order: Order) -> Order:
        task = await asyncio.to_thread(self._tasks[order["split"]].at, order["index"])
        context = vf.ModelContext(model=MODEL, client=self._client, sampling=vf.SamplingConfig(**order["sampling"]))
        traces: list[vf.Trace] = []

        def name_first(trace: vf.Trace) -> None:
            """Requests carry the name of the trace that they are made for. There is one episode for one trace."""
            if trace.agent.name == self._role:
                traces.append(trace)
                if len(traces) == 1:
                    trace.id = order["run"]

        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, context, on_trace=name_first)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = [f"{error.type}: {error.message}" for error in errors]
        if len(traces) != 1:
            return {"errors": [*said, f"{len(traces)} traces of the agent {self._role}; an episode has one"]}
        return {"errors": said, "ok": episode.ok, **facts(traces[0])}


def facts(trace: vf.Trace) -> Order:
    """What a trainer has to know of an episode, beside what it saw itself."""
    return {
        "rewards": {name: None if reward is None else reward.value for name, reward in trace.rewards.items()},
        "stop": trace.stop_condition,
        "context_full": any(call.error is not None and CONTEXT_FULL in call.error.message for call in trace.calls),
        "sampled": [
            [token for token, sampled in zip(node.token_ids, node.mask, strict=True) if sampled]
            for node in trace.nodes
            if node.sampled
        ],
        "rejected": sum(not branch.trainable for branch in trace.branches),
    }


def with_policy(config: vf.EnvConfig, *, max_turns: int) -> tuple[vf.EnvConfig, str]:
    """`config` with a place for every agent that has none, and the name of the one that the policy plays.

    Raises ValueError unless that is one agent alone, as a trajectory has one return; and for a harness that runs what
    the policy writes and does not say where.
    """
    agents, changed = agent_config_fields(config), {}
    played = [name for name, agent in agents.items() if agent.client is None]
    if len(played) != 1:
        raise ValueError(f"the policy would play {len(played)} of the agents {list(agents)}; give all but one a client")
    for name, harness in config.agent_harnesses().items():
        if "runtime" in agents[name].model_fields_set:
            continue
        if harness_class(harness.id).EXECUTES_CODE:
            raise ValueError(
                f"the harness {harness.id} of {name} runs what the policy writes; say where, as {{{name}: {{runtime: "
                "{type: docker}}}, or {type: subprocess} to let it have this host"
            )
        changed[name] = agents[name].model_copy(update={"runtime": vf.SubprocessConfig()})
    (role,) = played
    agent = changed.get(role, agents[role])
    turns = max_turns if agent.max_turns is None else min(max_turns, agent.max_turns)
    return config.model_copy(update={**changed, role: agent.model_copy(update={"max_turns": turns})}), role


def splits(env: vf.Env, held_out: Order | None) -> dict[str, Tasks]:
    """The tasks by split: of two tasksets, or of one, where what a task says decides which split it is of."""
    if held_out is None:
        return {
            "train": Tasks(iter(env.taskset), lambda task: not is_held_out(task)),
            "held_out": Tasks(iter(env.taskset), is_held_out),
        }
    other = type(env.config.taskset).model_validate(env.config.taskset.model_dump() | held_out)
    return {
        "train": Tasks(iter(env.taskset), lambda task: True),
        "held_out": Tasks(iter(load_taskset(other)), lambda task: True),
    }


def is_held_out(task: vf.Task) -> bool:
    said = task.data.model_dump(mode="json", exclude={"idx"})
    return zlib.crc32(json.dumps(said, sort_keys=True).encode()) % HELD_OUT_SHARE == 0


async def drive(orders: asyncio.Queue[Order | None], tell: Callable[[Order], None]) -> None:
    """Obey until the orders end."""
    settings = await orders.get()
    if settings is None:
        return
    os.environ[SECRET_VARIABLE] = settings["secret"]
    try:
        if shutil.which("uv") is None:
            raise ValueError("there is no `uv`, and verifiers would install one; `pip install uv` beside it")
        driver = Driver(settings, tell)
    except Exception as error:
        tell({"refused": f"{type(error).__name__}: {error}"})
        return
    async with driver.env.serving():
        try:
            while (order := await orders.get()) is not None:
                driver.obey(order)
        finally:
            await driver.end()


def listen(stream: TextIO, hear: Callable[[Order | None], None]) -> None:
    """Hand orders over. When they end, this process does, also where its loop no longer turns."""
    for line in stream:
        hear(json.loads(line))
    hear(None)
    threading.Timer(END_S, os._exit, (1,)).start()


async def main() -> None:
    news = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed here is for the log
    loop, orders = asyncio.get_running_loop(), asyncio.Queue[Order | None]()

    def tell(what: Order) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens, and stdin has ended too
            news.write(json.dumps(what) + "\n")

    def hear(order: Order | None) -> None:
        loop.call_soon_threadsafe(orders.put_nowait, order)

    threading.Thread(target=listen, args=(sys.stdin, hear), daemon=True).start()
    await drive(orders, tell)


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)
