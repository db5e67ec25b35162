"""Reward functions as others write them: with the signatures and habits of TRL, open-r1 and verl, in our own words.

Those from `verifies` to `is_too_long` are of the kinds that open-r1 has, which is on no package index:
tests/adapters/rewards runs the functions of TRL's and verl's wheels themselves.
"""

import asyncio
import math
import os
import re
import signal
import sys
import threading
import time
from functools import partial, update_wrapper
from typing import Any


def counts_seconds(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    """Has a timer, as Math-Verify has: only a main thread may set its signal."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        return [float(each[0]["content"].endswith(right)) for each, right in zip(completions, solution, strict=True)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def verifies(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
    from math_verify import parse, verify

    parsed = [(parse(right), parse(each[0]["content"])) for each, right in zip(completions, solution, strict=True)]
    return [float(verify(*both)) if both[0] else None for both in parsed]


def has_tags(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = [each[0]["content"] for each in completions]
    return [float(re.match(r"<think>.*</think>", text, re.DOTALL) is not None) for text in texts]


def made_cosine(*, wrong: tuple[float, float], right: tuple[float, float], max_chars: int) -> Any:
    def cosine(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
        """From the second of a pair to the first, as a reply grows to its maximum."""
        found = []
        for each, is_right in zip(completions, verifies(completions, solution), strict=True):
            long, short = right if is_right else wrong[::-1]
            progress = len(each[0]["content"]) / max_chars
            found.append(long + (short - long) * (1 + math.cos(math.pi * progress)) / 2)
        return found

    return cosine


cosine = made_cosine(wrong=(-1.0, -0.5), right=(0.5, 1.0), max_chars=10)


def code_of(completions: list[Any], *, at_once: int = 0, **kwargs: Any) -> list[float | None]:
    """Runs programs by a loop of its own, as many at once as a caller has bound, and skips what it cannot run."""

    async def run(program: str, info: dict[str, str]) -> float | None:
        if info["language"] != "python":
            return None
        async with asyncio.Semaphore(at_once):
            command, pipe = (sys.executable, "-c", program), asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe)
            output, _ = await process.communicate()
        return float(output.decode().strip() == info["output"])

    async def run_all() -> list[float | None]:
        both = zip(completions, kwargs["verification_info"], strict=True)
        return await asyncio.gather(*(run(each[0]["content"], info) for each, info in both))

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(run_all())
    finally:
        loop.close()


runs_code = update_wrapper(partial(code_of, at_once=2), code_of)


def is_too_long(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [max(-1.0, min(0.0, (2 - len(ids)) / 2)) for ids in completion_ids]


def reads_text(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    both = zip(prompts, completions, strict=True)
    return [float(text.strip().endswith("5") and prompt.strip() != "") for prompt, text in both]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    assert data_source in ("sums", "") and isinstance(extra_info, dict)
    return float(solution_str.split()[-1] == str(ground_truth))


def gives_a_dict(solution_str: str, ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    return {"score": float(solution_str.endswith(str(ground_truth))), "acc": True, "pred": solution_str}


def of_lists(data_sources: list[str], solution_strs: list[str], ground_truths: list[Any], extra_infos: Any) -> Any:
    return [float(text.endswith(str(right))) for text, right in zip(solution_strs, ground_truths, strict=True)]


class Made:
    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]


made = Made()


async def gives_later(episode: Any) -> float:
    return 0.5


def gives_something_to_await(episode: Any) -> Any:
    return gives_later(episode)


def forgets_return(completions: list[Any], **kwargs: Any) -> None:
    [1.0 for _ in completions]


def is_in_a_main_thread(episode: Any) -> list[float]:
    is_main = threading.current_thread() is threading.main_thread()
    print("what a function prints is no answer", flush=True)
    return [float(is_main) for _ in episode.turns]


def counts(episode: Any, calls: list[int] = []) -> float:  # noqa: B006  what a function keeps stays between calls
    calls.append(1)
    return float(len(calls))


def exits(episode: Any) -> float:
    sys.exit(3)


async def exits_later(episode: Any) -> float:
    sys.exit(3)


def interrupts(episode: Any) -> float:
    raise KeyboardInterrupt("now")


def raises_half_a_character(episode: Any) -> float:
    raise ValueError("\ud83d")


def cannot_divide(episode: Any) -> float:
    return 1 / 0


def crashes(episode: Any) -> float:
    os._exit(1)


def hangs(episode: Any) -> float:
    if episode.score:
        time.sleep(3600)
    return 1.0


def needs_a_call(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(each["tool_calls"]) for each in completions]
