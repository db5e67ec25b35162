"""The environments that the contract tests, with the expected numbers for each, and functions to play them."""

import asyncio
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, Observation
from slipstream.envhub.world import Change, World, tried

S = TypeVar("S", bound=msgspec.Struct)

# `make test-envs` plays the full counts, and 1,000 episodes in the memory test. CI plays a share of them.
DEFAULT_PROFILES = dict.fromkeys(("sqldb", "tools", "shell", "code", "swe"), "full")  # all others: small
SQL_SAMPLES = ("sql SELECT name, sql FROM sqlite_master", "sql SELECT 1 UNION SELECT 2")
TOOL_SAMPLES = ('{"name": "bank.list", "arguments": {}}', '{"name": "calendar.list", "arguments": {"day": "friday"}}')
BASH_SAMPLES = ("Act: bash\n```bash\nls -R\n```", "bash touch mine")
CODE_SAMPLES = ("run print(1)", "run\n```python\nprint(input())\n```")
GIT_SAMPLES = ("diff", "bash git status")
LOOKS = ("search(old doors)", "search(zebra)", "calculate(2 * (3 + 1.5))")
FULL_LENGTH = "SLIPSTREAM_ENVS_IN_FULL" in os.environ


@dataclass(frozen=True, slots=True)
class Case:
    """One environment with options, and the numbers that its tests expect."""

    name: str
    max_turns: int  # enough for an expert of whose actions 30 % are replaced by random ones
    noisy_success: float  # minimum success rate of that expert; 1.0 if every mistake can be undone
    options: dict[str, Any] = field(default_factory=dict)
    # Their snapshots must be refused.
    other_options: dict[str, Any] = field(default_factory=lambda: {"profile": "full"})
    recovers: float = 0.95  # minimum success rate of the expert after a few random actions
    distinct: float = 0.83  # minimum share of 300 held-out tasks with distinct texts
    share: float = 0.2  # of the full counts; CI plays only this
    least: int = 2  # of CI's counts
    samples: tuple[str, ...] = ()  # actions that are valid in every state, if it cannot list its actions
    max_walk: int = 1000  # the maximum of random actions in a row in CI
    is_spaced: bool = True  # a word-level tokenizer can play it: white space between any two characters is allowed

    def make(self) -> Env:
        return make_env(self.name, self.options)

    def task(self, split: str, index: int) -> Task:
        return task_of(self.name, index, split)

    @property
    def has_rules(self) -> bool:
        return self.options.get("profile", DEFAULT_PROFILES.get(self.name, "small")) == "full"

    def count(self, full: int) -> int:
        return full if FULL_LENGTH else max(self.least, round(full * self.share))

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.options.values())])


SQL = Case("sqldb", 40, 0.95, is_spaced=False, samples=SQL_SAMPLES)
TOOLS = Case("tools", 60, 0.95, is_spaced=False, samples=TOOL_SAMPLES)
# Their commands run in the sandbox.
SLOW = Case("shell", 10, 0.95, is_spaced=False, share=0.01, max_walk=2)
FULL, SMALL = {"profile": "full"}, {"profile": "small"}
PROGRAMS, HARD = (*LOOKS, "python print(1)"), {"level": 3} | FULL
CASES = [
    Case("shop", 40, 0.6),
    Case("shop", 60, 0.6, FULL, share=0.05, other_options=SMALL),
    Case("household", 100, 0.99),
    Case("household", 150, 0.99, FULL, share=0.1, other_options=SMALL),
    Case("household", 100, 0.99, {"task_types": ["pick_two_obj"]}),
    Case("grid", 60, 0.7, recovers=0.7),
    Case("grid", 150, 0.4, {"size": 7} | FULL, recovers=0.6, share=0.05, other_options={}),
    Case("grid", 60, 0.6, {"game": "frozen_lake"}, recovers=0.7),
    Case("grid", 200, 1.0, {"game": "maze", "size": 9}),
    Case("grid", 40, 0.3, {"game": "bandit"}),
    Case("craft", 80, 1.0),
    Case("craft", 200, 1.0, {"depth": 4} | FULL, other_options={}),
    Case("kg", 60, 0.4, distinct=0.45),
    Case("kg", 80, 0.3, {"hops": 4} | FULL, other_options={}),
    Case("web", 100, 0.4, share=0.05, other_options={"errands": 2}),
    Case("web", 150, 0.25, {"errands": 3} | FULL, share=0.03, other_options={}),
    Case("research", 40, 0.95, samples=LOOKS, other_options={"pages": 12}, share=0.1),
    Case("research", 40, 0.95, {"level": 2, "pages": 48}, samples=LOOKS, share=0.05),
    replace(SLOW, name="research", max_turns=40, max_walk=3, samples=PROGRAMS, options=HARD, other_options={}),
    replace(SQL, distinct=0.45, other_options={"level": 2}),
    replace(SQL, distinct=0.6, options={"level": 3} | SMALL),
    replace(TOOLS, other_options={"errands": 1}),
    replace(TOOLS, max_turns=80, options={"errands": 5} | SMALL),
    replace(SLOW, noisy_success=0.4, recovers=0.4, samples=BASH_SAMPLES, other_options={"task": "read"}),
    replace(SLOW, name="code", samples=CODE_SAMPLES, other_options={"steps": 1}),
    replace(SLOW, name="swe", max_turns=40, samples=GIT_SAMPLES, other_options={"files": 1}),
]


def task_of(env: str, index: int = 0, split: str = "train") -> Task:
    return Task(env=env, split=split, index=index)


def offered(env: Env, case: Case) -> list[str]:
    """Return valid actions: the listed ones, or else the samples and the expert's action."""
    actions = env.admissible()
    return [*case.samples, env.expert()] if actions is None else actions


def said(observation: Observation) -> str:
    return observation.messages[-1].content


def act(world: World[S], action: str, state: S | None = None) -> Change[S]:
    """The result of `action` in `state`, or else at the start."""
    return asyncio.run(tried(world, world.first if state is None else state, action))


async def rollout(env: Env, case: Case, task: Task, rng: random.Random, *, noise: float) -> list[Observation]:
    """Play an episode by the expert, with a random action at probability `noise`. Every action must be valid."""
    observations = [await env.reset(task)]
    while not observations[-1].done and len(observations) <= case.max_turns:
        action = rng.choice(offered(env, case)) if rng.random() < noise else env.expert()
        observations.append(await env.step(action))
        assert observations[-1].valid_action, f"{action!r} was offered, but is invalid"
    return observations


async def do_all(env: Env, task: Task, actions: list[str]) -> list[Observation]:
    return [await env.reset(task), *[await env.step(action) for action in actions]]


async def some_actions(env: Env, case: Case, task: Task, rng: random.Random, count: int) -> list[str]:
    """Do up to `count` random actions that do not end the episode, and return them."""
    await env.reset(task)
    actions: list[str] = []
    final: set[str] = set()  # the actions that end the episode in the current state
    while len(actions) < (count if FULL_LENGTH else min(count, case.max_walk)):
        choices = [action for action in offered(env, case) if action not in final]
        if not choices:
            break
        action, state = rng.choice(choices), None if env.replay_only else env.snapshot()
        if (await env.step(action)).done:
            final.add(action)
            await back(env, state, task, actions)
            continue
        actions.append(action)
        final.clear()
    return actions


async def back(env: Env, state: bytes | None, task: Task, actions: list[str]) -> None:
    """Return to a state that `actions` have reached: by its snapshot, or else by the same actions again."""
    await do_all(env, task, actions) if state is None else env.restore(state)


def texts(observations: list[Observation]) -> str:
    return "\n".join(message.content for observation in observations for message in observation.messages)
