"""So much of verifiers 0.4.0 as Slipstream's driver uses: on the wire it asks what 0.4.0 was seen to ask, and demands
of replies what that demands. Its episodes are of numbers, not words: `does` in the taskset's configuration says which.
"""

import asyncio
import contextlib
import json
import math
import os
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace


class Model:
    """As a pydantic model, for what is asked of one."""

    def __init__(self, **fields):
        vars(self).update(fields)
        self.model_fields_set = set(fields)

    def model_dump(self, mode="python", exclude=()):
        return {name: vars(self)[name] for name in self.model_fields_set if name not in exclude}

    def model_copy(self, update):
        return type(self)(**self.model_dump() | update)

    @classmethod
    def model_validate(cls, data):
        return cls(**data)


class AgentConfig(Model):
    client, max_turns, harness = None, None, "null"


class TasksetConfig(Model):
    does, turns, num_tasks, first, pids = "talk", 3, 40, 0, ""


class EnvConfig(Model):
    def agent_harnesses(self):
        agents = {name: agent for name, agent in vars(self).items() if isinstance(agent, AgentConfig)}
        return {name: SimpleNamespace(id=agent.harness) for name, agent in agents.items()}


SamplingConfig = SubprocessConfig = TrainClientConfig = ModelContext = Task = Model
Trace = SimpleNamespace


class Taskset:
    def __init__(self, config):
        self.config = config

    def __iter__(self):
        for index in range(self.config.num_tasks):
            yield Task(data=Model(idx=index, start=self.config.first + index % 20))


def note(pids):
    with Path(pids).open("a") as known:
        known.write(f"{os.getpid()}\n")


class CallFailed(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status, self.message = status, message


class Env:
    def __init__(self, config):
        assert config.agent.runtime is not None
        self.config, self.taskset = config, Taskset(config.taskset)

    @contextlib.asynccontextmanager
    async def serving(self):
        if self.config.taskset.pids:
            note(self.config.taskset.pids)
        print("what a taskset prints is no news")
        yield

    def slots(self, task):
        return [SimpleNamespace(task=task)]

    async def run_slot(self, slot, context, on_trace):
        episode = SimpleNamespace(ok=False, errors=[], traces=[])
        unscored = {"right": None, "short": None}
        trace = Trace(id="random", agent=SimpleNamespace(name="agent"), stop_condition=None, rewards=unscored)
        trace.nodes, trace.calls, trace.errors, trace.branches = [], [], [], []
        episode.traces.append(trace)
        on_trace(trace)
        try:
            await Player(self.config, context, trace, slot.task.data.start).play(self.config.taskset.does)
        except CallFailed as error:
            trace.errors.append(SimpleNamespace(type="ProviderError", message=error.message))
            return episode
        episode.ok = True
        trace.stop_condition = trace.stop_condition or "agent_completed"
        return episode


class Player:
    """One episode: the policy is asked about [start, 1], and each answer is followed by a 2."""

    def __init__(self, config, context, trace, start):
        self.config, self.context, self.trace, self.start = config, context, trace, start

    async def play(self, does):
        taskset, trace = self.config.taskset, self.trace
        if does == "second_agent":
            trace.id = "another"
        prompt, changes = [self.start, 1], CHANGES.get(does, {})
        for turn in range(taskset.turns):
            if turn == self.config.agent.max_turns:
                trace.stop_condition = "max_turns"
                break
            try:
                answer = await self.ask(prompt, changes, timeout_s=2.0 if does == "impatient" else 60)
            except CallFailed as error:
                if does == "impatient":
                    break
                if does != "context" or "maximum context length" not in error.message:
                    raise
                break
            prompt = [*prompt, *answer, 2]
            if does == "branch" and turn == 0:
                prompt = [self.start, *answer, 3]
            if does == "context":
                prompt += [2] * 20
            if does == "die":
                os._exit(3)
            if does == "hang":
                await asyncio.sleep(3600)
            if does == "random" and turn == 1:
                prompt.append(os.getpid() % 50)
        if does == "timeout":
            trace.stop_condition = "agent_timeout"
        if does == "forget":
            trace.nodes.pop()
        if does != "unscored":
            trace.rewards = {"right": SimpleNamespace(value=0.5), "short": SimpleNamespace(value=0.25)}
        if does == "nan":
            trace.rewards["right"] = SimpleNamespace(value=math.nan)
        if does == "secrets":
            seen = {name: float(name in os.environ) for name in ("HIDDEN_FROM_EPISODES", "JUDGE_KEY")}
            trace.rewards = {name: SimpleNamespace(value=value) for name, value in seen.items()}

    async def ask(self, prompt, changes, *, timeout_s):
        call = SimpleNamespace(error=None)
        self.trace.calls.append(call)
        try:
            tokens = await self._sampled(prompt, changes, timeout_s)
        except CallFailed as error:
            call.error = error
            raise
        mask = [False, *[True] * len(tokens)]
        self.trace.nodes.append(SimpleNamespace(token_ids=[prompt[-1], *tokens], mask=mask, sampled=True))
        return tokens

    async def _sampled(self, prompt, changes, timeout_s):
        """As `renderers.client.generate` of renderers 0.1 asks, and what it refuses in a reply."""
        client = self.context.client
        (card,) = (await self._call("/v1/models", None, 60))["data"]
        assert card["id"] == self.context.model and isinstance(card["max_model_len"], int)
        if len(prompt) > card["max_model_len"]:
            raise CallFailed(400, f"Prompt length ({len(prompt)}) exceeds maximum context length")
        sampling = {"stop_token_ids": [99], "logprobs": 1, "skip_special_tokens": False}
        sampling = self.context.sampling.model_dump() | sampling | changes.get("sampling", {})
        body = {"model": self.context.model, "token_ids": prompt, "sampling_params": sampling} | changes.get("body", {})
        assert client.base_url.endswith("/v1")
        reply = await self._call("/inference/v1/generate", body, timeout_s)
        (choice,) = reply["choices"]
        content = choice["logprobs"]["content"]
        assert isinstance(reply["request_id"], str) and choice["finish_reason"] in ("stop", "length")
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        for entry in content:
            assert type(entry["logprob"]) in (int, float) and math.isfinite(entry["logprob"])
            assert entry["logprob"] != -9999.0
        return choice["token_ids"]

    async def _call(self, path, body, timeout_s):
        client = self.context.client
        url, data = client.base_url.removesuffix("/v1") + path, None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {os.environ[client.api_key_var]}", "X-Session-ID": self.trace.id}
        request = urllib.request.Request(url, data, headers | {"Content-Type": "application/json"})

        def call():
            try:
                with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                raise CallFailed(error.code, error.read().decode()) from None
            except OSError as error:
                raise CallFailed(503, str(error)) from None

        return await asyncio.to_thread(call)


CHANGES = {"hot": {"sampling": {"temperature": 0.3}}, "strange_token": {"body": {"token_ids": [100]}}}
