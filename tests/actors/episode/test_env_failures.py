"""What an environment does wrong: its episode fails, and neither the actor nor the policy is to blame."""

import asyncio
import builtins
import contextlib
import gc
import math
import sys
import tracemalloc
import unittest.mock
from dataclasses import replace
from typing import Any

import pytest

from slipstream.actors.episode import answer as answers
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.host.event_loop import run as run_loop
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Outcome, StopReason, Task
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.shop.shop import ShopEnv
from tests.actors.episode.episodes import ALLOWANCE, Broken, attempt_on, engine_of, failure_of, play, rollout_of, saying
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer, shop_tokenizer


def answer(**changes: Any) -> Observation:
    return replace(Observation(messages=(Message("user", "fine"),), rewards={"purchase": 0.0}), **changes)


class Unprintable(Exception):
    def __str__(self) -> str:
        return str(1 // 0)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (EnvError("the shop burnt down"), "the shop burnt down"),
        (KeyError("price"), "KeyError: 'price'"),
        (TimeoutError("a socket"), r"no answer within 30\.0 s"),
        ("hang", r"no answer within 30\.0 s"),
        (None, "returned a NoneType, expected an Observation"),
        ({"reward": 1}, "returned a dict"),
        (answer(rewards={}), "step returned no rewards; return a reward of 0"),
        (answer(rewards=None), "returned None as rewards, expected a dict"),
        *(
            (answer(rewards={"purchase": wrong}), f"returned reward 'purchase' = {wrong!r}, expected a number")
            for wrong in (math.nan, -math.inf, "1", None, True)
        ),
        *((answer(score=wrong), f"returned score {wrong!r}, expected") for wrong in (2.0, math.nan, True)),
        (answer(messages=("fine",)), "returned 'fine' as a message, expected a Message"),
        (answer(messages=(Message("user", b"fine"),)), "expected a Message"),  # type: ignore[arg-type]
        (answer(messages=(Message(None, "fine"),)), "expected a Message"),  # type: ignore[arg-type]
        (answer(rewards={"half \ud83d": 0.0}), "expected valid Unicode text"),
        (answer(rewards={3: 0.0}), "named a reward 3, expected valid Unicode text"),
        *((answer(success=wrong), f"returned success = {wrong}, expected True or False") for wrong in (None, 1)),
        (answer(valid_action=1), "returned valid_action = 1"),
        (answer(messages=(message for message in ())), "returned a generator as messages"),
        (
            answer(messages=(Message("user", "x" * (5 << 20)),)),
            r"returned 5242892 characters, the limit of an observation is 4194304; make the environment cut its texts",
        ),
        (answer(rewards={"x" * (5 << 20): 0.0}), "returned 5242888 characters"),
        (answer(messages=(Message("user", ""),) * 20_000), "returned 20001 messages and rewards, the limit is 10000"),
        (answer(messages=(Message("user", b"x" * (5 << 20)),)), "returned 5242892 characters"),  # type: ignore[arg-type]
        (Unprintable(), r"Unprintable: \(no text: str\(\) of it raised ZeroDivisionError\)"),
        (EnvError("x" * (1 << 20)), "^x{4000}$"),
    ],
)
def test_a_broken_environment_is_an_env_failure_and_never_a_reward_of_0(wrong: object, complaint: str) -> None:
    env = Broken(wrong)
    script = saying(shop_tokenizer(), "search[dress]<|end|>", "click[red]<|end|>", "click[red]<|end|>")
    failure = failure_of(env, engine_of(script), complaint=complaint, allowance=replace(ALLOWANCE, max_turns=3))
    assert failure == (StopReason.ENV_ERROR, Outcome.ENV_FAILURE)


def every_exception() -> list[BaseException]:
    """One of each kind that Python has, the three that end a program among them, and asyncio's cancellation."""
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
    made = []
    for kind in (*kinds, asyncio.CancelledError):
        for arguments in ((), ("x",), ("x", b"x", 0, 1, "x"), ("x", [Exception()])):
            with contextlib.suppress(TypeError, ValueError):
                made.append(kind(*arguments))
                break
    return made


def test_no_exception_of_an_environment_is_anything_but_its_failure() -> None:
    raised = every_exception()
    assert {KeyboardInterrupt, SystemExit, GeneratorExit, BaseException} <= {type(error) for error in raised}
    script = saying(shop_tokenizer(), *("search[dress]<|end|>" for _ in range(2 * len(raised))))
    for error in raised:
        assert failure_of(Broken(error), engine_of(script), complaint=None)[1] is Outcome.ENV_FAILURE, error


def test_an_episode_that_the_garbage_collector_closes_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """As where a process ends whose loop was closed in the middle of a step."""
    begun, loop = asyncio.Event(), asyncio.new_event_loop()

    async def steps() -> Observation:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    stepping = loop.create_task(answers.answer(steps, timeout_s=60.0))
    loop.run_until_complete(begun.wait())
    loop.close()
    ignored = list[object]()
    with unittest.mock.patch("sys.unraisablehook", ignored.append):
        del stepping, loop
        gc.collect()
    assert not ignored
    assert not [record for record in caplog.records if record.name == "slipstream.actors.episode.answer"]


def test_a_gigantic_observation_is_refused_before_any_of_it_is_copied() -> None:
    env = Broken(answer(messages=(Message("user", "x" * (256 << 20)),)))
    tracemalloc.start()
    with pytest.raises(EpisodeFailed, match="returned 268435468 characters"):
        play(env, engine_of(saying(shop_tokenizer(), "search[dress]<|end|>", "click[red]<|end|>")))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


class StartsTasks(ShopEnv):
    """A shop whose own task, and whose own callback, exits."""

    async def step(self, action: str) -> Observation:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.create_task(self._exit())
        return await super().step(action)

    async def _exit(self) -> None:
        raise KeyboardInterrupt


def test_the_loop_of_an_actor_outlives_an_environments_tasks_that_exit() -> None:
    async def play_on() -> str:
        with pytest.raises(EpisodeFailed, match="KeyboardInterrupt"):
            await rollout_of(StartsTasks(), engine_of(saying(shop_tokenizer(), "search[dress]<|end|>")))
        return "went on"

    assert run_loop(play_on()) == "went on"


class Unruly(ShopEnv):
    """A shop that fails as its task says: it exits, or waits for a task of its own that was cancelled."""

    def __init__(self, doing: str, *, when: str) -> None:
        super().__init__()
        self.doing, self.when = doing, when

    async def reset(self, task: Task) -> Observation:
        await self._be("reset")
        return await super().reset(task)

    async def close(self) -> None:
        await self._be("close")

    async def _be(self, when: str) -> None:
        if when == self.when and self.doing == "exits":
            raise SystemExit(0)
        if when == self.when:
            own = asyncio.create_task(asyncio.sleep(60))
            own.cancel()
            await own


@pytest.mark.parametrize("doing", ["exits", "cancels"])
async def test_a_close_that_does_the_same_costs_nothing(doing: str) -> None:
    envs = {"shop": MixtureEntry(name=f"{__name__}:Unruly", options={"doing": doing, "when": "close"})}
    async with fresh_env(envs, attempt_on().task, timeout_s=1.0):
        pass


NO_SYSTEM = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message("half a pair \udcff", "text"), "expected a Message of valid Unicode text"),
        (Message("system", "time is short"), "cannot be turned into tokens: TemplateError: System role not supported"),
    ],
)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_words_that_the_model_cannot_be_told_are_an_env_failure(message: Message, complaint: str, at: str) -> None:
    tokenizer = byte_tokenizer(NO_SYSTEM + CHATML)
    said = answer(messages=(message,))
    engine = engine_of(saying(tokenizer, *["search[dress]<|im_end|>"] * 2), max_tokens=10_000)
    settings = {"tokenizer": tokenizer, "allowance": replace(ALLOWANCE, max_tokens=10_000)}
    assert failure_of(Broken(said, at=at), engine, complaint=complaint, **settings)[1] is Outcome.ENV_FAILURE


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (Broken(ConnectionRefusedError("no server"), at="reset"), "ConnectionRefusedError: no server"),
        (Broken(None, at="reset"), "returned a NoneType"),
        (Broken(answer(messages=()), at="reset"), "reset returned an observation that is done or has no messages"),
        (Broken(answer(terminated=True), at="reset"), "reset returned an observation that is done or has no messages"),
        (
            Broken(answer(messages=(Message("user", "dress " * 300),)), at="reset"),
            "its first prompt of 30[0-9] tokens leaves no room in `model.max_tokens` = 256",
        ),
        (Unruly("exits", when="reset"), "SystemExit: 0"),
        (Unruly("cancels", when="reset"), "it awaited something that was cancelled"),
    ],
)
def test_a_reset_that_fails_is_an_env_failure_and_ends_neither_actor_nor_task(env: ShopEnv, complaint: str) -> None:
    assert failure_of(env, engine_of(saying(shop_tokenizer())), complaint=complaint)[1] is Outcome.ENV_FAILURE
