"""Reward functions of others, unmodified, in processes of their own."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.common.config.config import load_config
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode
from slipstream.envhub.rewards.function import SILENT_EPISODES, workers_of
from slipstream.envhub.rewards.part import parts_of
from slipstream.tools.run.check_input import check_env
from tests.envhub.dataset.rows import write_rows
from tests.envhub.rewards.test_rewards import episode_of, reward_of, turn_of
from tests.waiting import wait_until

OTHERS = "tests.envhub.rewards.others"
SUM = {"solution": "$5$", "answer": 5}
TEXT, CHAT = "2 + 3?", [{"role": "user", "content": "2 + 3?"}]
VERL = {"data_source": "sums", "reward_model": {"ground_truth": "5", "style": "rule"}, "extra_info": {"index": 0}}


def value_of(function: str, episode: Episode, **settings: Any) -> float | None:
    return reward_of({"own": {"part": f"{OTHERS}:{function}"}}, episode, **settings).values.get("own")


def replied(reply: str, prompts: Any, **columns: Any) -> Episode:
    return episode_of(turn_of(reply), columns={"prompts": prompts, **columns})


@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
@pytest.mark.parametrize(
    ("function", "reply", "columns", "expected"),
    [
        ("counts_seconds", "it is $5$", SUM, 1.0),
        ("verifies", r"it is \boxed{\frac{10}{2}}", SUM, 1.0),
        ("verifies", r"it is \boxed{6}", SUM, 0.0),
        ("verifies", r"it is \boxed{6}", {"solution": "none"}, None),
        ("has_tags", "<think>2 and 3</think>5", {}, 1.0),
        ("has_tags", "5", {}, 0.0),
        ("cosine", r"\boxed{5} ", SUM, 0.5),  # ten characters
        ("cosine", r"$5$", SUM, pytest.approx(0.896946)),
        ("cosine", r"$6$", SUM, pytest.approx(-0.896946)),
        ("runs_code", "print(5)", {"verification_info": {"language": "python", "output": "5"}}, 1.0),
        ("runs_code", "print(6)", {"verification_info": {"language": "python", "output": "5"}}, 0.0),
        ("runs_code", "puts 5", {"verification_info": {"language": "ruby", "output": "5"}}, None),
        ("is_too_long", "5", {}, -0.5),  # three tokens
        ("reads_text", "it is 5", {}, 1.0),
        ("compute_score", "it is 5", VERL, 1.0),
        ("compute_score", "it is 5", {"ground_truth": 5}, 1.0),
        ("compute_score", "it is 4", {"answer": 5}, 0.0),
        ("gives_a_dict", "it is 5", VERL, 1.0),
        ("of_lists", "it is 5", VERL, 1.0),
        ("made", "it is 5", {}, 3.0),
        ("gives_something_to_await", "5", {}, 0.5),
        ("is_in_a_main_thread", "5", {}, 1.0),
    ],
)
def test_a_function_of_others_gives_what_it_gives_them(
    function: str, reply: str, columns: dict[str, Any], expected: float | None, prompts: Any
) -> None:
    assert value_of(function, replied(reply, prompts, **columns)) == expected


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("exits", r"raised SystemExit at others\.py:\d+: 3"),
        ("exits_later", "raised SystemExit: 3"),
        ("interrupts", r"raised KeyboardInterrupt at others\.py:\d+: now"),
        ("cannot_divide", r"raised ZeroDivisionError at others\.py:\d+: division by zero"),
        ("raises_half_a_character", r"raised ValueError at others\.py:\d+: \ufffd"),
        ("crashes", "the process of the function ended: EOFError"),
    ],
)
def test_whatever_a_function_does_fails_the_attempt_and_the_next_is_served(function: str, complaint: str) -> None:
    for _ in range(2):
        with pytest.raises(EnvError, match=complaint):
            value_of(function, episode_of(turn_of("x")))


def test_a_function_keeps_its_process_between_calls_until_it_hangs_and_the_next_episode_gets_another() -> None:
    assert [value_of("counts", episode_of(turn_of("x"))) for _ in range(3)] == [1, 2, 3]
    assert value_of("hangs", episode_of(turn_of("x"))) == 1.0  # its process is up
    for _ in range(2):
        with pytest.raises(EnvError, match=r"no answer within `env\.step_timeout_s` = 1 s"):
            value_of("hangs", episode_of(turn_of("x"), success=True), timeout_s=1)
        assert value_of("hangs", episode_of(turn_of("x"))) == 1.0
    workers_of(f"{OTHERS}:hangs").end()


def test_a_column_that_no_process_can_get_is_named() -> None:
    with pytest.raises(EnvError, match="a column of the task cannot be sent to the function's process"):
        value_of("made", replied("x", TEXT, world=object()))


async def test_a_function_that_never_gives_a_number_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    (part,) = parts_of("env.rewards", {"x": {"part": f"{OTHERS}:forgets_return"}})
    for _ in range(SILENT_EPISODES - 1):
        assert await part.values(replied("5", TEXT), timeout_s=60) is None
    assert not caplog.records
    for _ in range(SILENT_EPISODES):
        assert await part.values(replied("5", TEXT), timeout_s=60) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"FAULT: `env.rewards.x.part` {OTHERS}:forgets_return has given no number for any of 64 episodes, only None; "
        "does it `return` the number?"
    )


def test_each_function_is_rehearsed_before_the_run(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": TEXT, "solution": "$5$", "answer": 5}])
    options = [f"env.options.{split}={path}" for split in ("train", "held_out")]
    config = load_config(None, ["env.name=dataset", *options, "env.options.check=number"])

    def try_function(function: str, **settings: Any) -> None:
        config.env.rewards = {"x": {"part": f"{OTHERS}:{function}", **settings}}
        check_env(config.env)

    for function in ("counts_seconds", "has_tags", "compute_score", "forgets_return", "is_in_a_main_thread"):
        try_function(function)
    for function, complaint in (
        ("needs_a_call", "`env.rewards.x` 'tests.envhub.rewards.others:needs_a_call' was tried on the made-up reply"),
        ("cannot_divide", "raised ZeroDivisionError at others.py"),
    ):
        with pytest.raises(ConfigError) as error:
            try_function(function)
        assert complaint in str(error.value) and "must return a number, or None, for any reply" in str(error.value)
    try_function("cannot_divide", only_if="success")  # the made-up reply has none
    for part in ({"part": "length", "budget_tokens": 9}, {"part": f"{OTHERS}:has_tags", "success_from": 1.0}):
        config.env.rewards = {"right": part}
        with pytest.raises(ConfigError, match=r"`env\.rewards\.right`: the environment has a reward of this name"):
            check_env(config.env)
    config.env.options["check"] = "none"  # then it has no reward of its own
    check_env(config.env)
    away = EnvConfig(name="remote", options={"url": "http://127.0.0.1:1", "env": "shop"}, rewards={"format": {}})
    check_env(away)  # its server may start later
    config.env.options["check"] = "number"
    path = write_rows(tmp_path / "others.jsonl", [{"prompt": TEXT, "right": 5}])
    config.env.options |= {"train": path, "held_out": path, "answer": "right"}
    with pytest.raises(ConfigError, match="data_source, solution_str, ground_truth and extra_info: missing a required"):
        try_function("compute_score")


def test_the_processes_of_functions_end_with_their_parent() -> None:
    program = (
        "import asyncio, os, tests.envhub.rewards.test_functions as t; t.value_of('counts', t.replied('x', 'y')); "
        f"w = t.workers_of('{OTHERS}:counts')._idle.pop(); print(w._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), "the end of the function's process")
