"""Play episodes of one environment of `verifiers` on request: a program for the Python that has that package.

It imports no other module of Slipstream, and no other module of Slipstream imports `verifiers`. Requests come on stdin
and reports go to stdout, one JSON object a line. The first request has the settings, the others are `run` and `cancel`.
The program ends at the end of stdin, because then the actor has ended.
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
SECRET_VARIABLE = "SLIPSTREAM_API_KEY"  # verifiers does not pass variables with API_KEY in their names to programs
HELD_OUT_SHARE = 8  # one task in this many is held out if the taskset has no split
END_S = 5.0  # time to end running episodes
CONTEXT_FULL = "maximum context length"  # in the error for a prompt that is too long, of their renderer and our server

JsonObject = dict[str, Any]


class Tasks:
    """The tasks of a split, read from the taskset when they are needed, and used repeatedly."""

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
            raise ValueError("the split has no tasks; set another taskset for it in `env.options.held_out`")
        return self._found[index % len(self._found)]


class Driver:
    """One environment and its running episodes. The policy's agent requests tokens at `url`, by episode."""

    def __init__(self, settings: JsonObject, report: Callable[[JsonObject], None]) -> None:
        """Raises the errors of verifiers for an invalid configuration."""
        self._report = report
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

    def handle(self, request: JsonObject) -> None:
        if "cancel" in request:
            if request["cancel"] in self._running:
                self._running[request["cancel"]].cancel()
            return
        name = request["run"]
        self._running[name] = asyncio.create_task(self._run(request))
        self._running[name].add_done_callback(lambda _: self._running.pop(name))

    async def end(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, request: JsonObject) -> None:
        try:
            self._report({"ended": request["run"], **await self._play(request)})
        except Exception as error:
            self._report({"ended": request["run"], "errors": [f"{type(error).__name__}: {error}"]})

    async def _play(self, request: JsonObject) -> JsonObject:
        task = await asyncio.to_thread(self._tasks[request["split"]].at, request["index"])
        context = vf.ModelContext(model=MODEL, client=self._client, sampling=vf.SamplingConfig(**request["sampling"]))
        traces: list[vf.Trace] = []

        def name_first(trace: vf.Trace) -> None:
            """Give the trace the episode's name, which requests for tokens carry. An episode has one trace."""
            if trace.agent.name == self._role:
                traces.append(trace)
                if len(traces) == 1:
                    trace.id = request["run"]

        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, context, on_trace=name_first)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        messages = [f"{error.type}: {error.message}" for error in errors]
        if len(traces) != 1:
            return {"errors": [*messages, f"{len(traces)} traces of the agent {self._role}; an episode has one"]}
        return {"errors": messages, "ok": episode.ok, **facts(traces[0])}


def facts(trace: vf.Trace) -> JsonObject:
    """Return the facts about an episode that its requests for tokens do not show."""
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
    """Return `config` with a runtime for every agent, and the name of the agent that the policy plays.

    Raises ValueError unless the policy plays exactly one agent, because a trajectory has one return. Also raises it if
    a harness runs the policy's code and its configuration has no runtime.
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
                f"the harness {harness.id} of {name} runs the policy's code; set a runtime, such as {{{name}: "
                "{runtime: {type: docker}}}, or {type: subprocess} to run it on this host"
            )
        changed[name] = agents[name].model_copy(update={"runtime": vf.SubprocessConfig()})
    (role,) = played
    agent = changed.get(role, agents[role])
    turns = max_turns if agent.max_turns is None else min(max_turns, agent.max_turns)
    return config.model_copy(update={**changed, role: agent.model_copy(update={"max_turns": turns})}), role


def splits(env: vf.Env, held_out: JsonObject | None) -> dict[str, Tasks]:
    """Return the tasks by split: from two tasksets, or from one, in which a task's content decides its split."""
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
    content = task.data.model_dump(mode="json", exclude={"idx"})
    return zlib.crc32(json.dumps(content, sort_keys=True).encode()) % HELD_OUT_SHARE == 0


async def serve(requests: asyncio.Queue[JsonObject | None], report: Callable[[JsonObject], None]) -> None:
    settings = await requests.get()
    if settings is None:
        return
    os.environ[SECRET_VARIABLE] = settings["secret"]
    try:
        if shutil.which("uv") is None:
            raise ValueError("`uv` is missing, and verifiers would install it; run `pip install uv` in its environment")
        driver = Driver(settings, report)
    except Exception as error:
        report({"refused": f"{type(error).__name__}: {error}"})
        return
    async with driver.env.serving():
        try:
            while (request := await requests.get()) is not None:
                driver.handle(request)
        finally:
            await driver.end()


def read_requests(stream: TextIO, put: Callable[[JsonObject | None], None]) -> None:
    """Pass requests on. At their end, also end this process, even if its event loop hangs."""
    for line in stream:
        put(json.loads(line))
    put(None)
    threading.Timer(END_S, os._exit, (1,)).start()


async def main() -> None:
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # everything else that is printed goes to the log
    loop, requests = asyncio.get_running_loop(), asyncio.Queue[JsonObject | None]()

    def report(facts: JsonObject) -> None:
        with contextlib.suppress(BrokenPipeError):  # the actor has ended, and so has stdin
            reports.write(json.dumps(facts) + "\n")

    def put(request: JsonObject | None) -> None:
        loop.call_soon_threadsafe(requests.put_nowait, request)

    threading.Thread(target=read_requests, args=(sys.stdin, put), daemon=True).start()
    await serve(requests, report)


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)
