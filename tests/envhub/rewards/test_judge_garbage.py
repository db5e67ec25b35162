"""Every kind of judge against every kind of answer: each ends in a mark, or in a retry that is counted, never in 0."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from slipstream.actors.engine.engine import Completion
from slipstream.actors.host.own_judge import OwnJudge
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.trajectory import Sampling
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards import attempts
from slipstream.envhub.rewards.episode import Reading
from slipstream.envhub.rewards.part import Part, book_on, group_parts, judge_by, judge_of, parts_of
from slipstream.replay.fleet.judge_account import JudgeAccount
from tests.actors.episode.episodes import engine_of
from tests.actors.scripted_judge import Reply, ScriptedJudge
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.envhub.rewards.test_group_judge import RUBRIC, compared, shown
from tests.envhub.rewards.test_rewards import episode_of, turn_of

TOKENIZER = byte_tokenizer(CHATML)
# How it compares: a good answer, and the marks that this gives.
COMPARE = {"episode": ('{"clear": 7}', [0.7]), "listwise": ('{"1": {"clear": 7}, "2": {"clear": 7}}', [0.7, 0.7])}

Garbage = Callable[[str], str]
MALFORMED: dict[str, Garbage] = {
    "empty": lambda good: "",
    "white space": lambda good: " \n ",
    "cut in the middle": lambda good: good[: len(good) // 2],
    "no JSON": lambda good: "They are all great.",
    "JSON and more": lambda good: f"{good} Well done!",
    "a refusal": lambda good: "I'm sorry, but I can't help with that.",
    "a thought that never ends": lambda good: f"<think>{good}",
    "null": lambda good: "null",
    "a list": lambda good: "[7, 7]",
    "one rank of two": lambda good: '{"1": {"clear": 7}}',
    "three ranks of two": lambda good: '{"1": {"clear": 7}, "2": {"clear": 7}, "3": {"clear": 7}}',
    "ranks as texts": lambda good: '{"1": "good", "2": "bad"}',
    "a mark outside the scale": lambda good: good.replace("7", "11"),
    "a mark below the scale": lambda good: good.replace("7", "-1"),
    "a mark as text": lambda good: good.replace("7", '"7"'),
    "a mark that is true": lambda good: good.replace("7", "true"),
    "an infinite mark": lambda good: good.replace("7", "1e999"),
    "another criterion": lambda good: good.replace("clear", "right"),
    "a criterion more": lambda good: good.replace("}", ', "style": 1}', 1),
    "an empty object": lambda good: "{}",
    "no number": lambda good: good.replace("7", "NaN"),
    "deeply nested": lambda good: "[" * 3000,
}
READABLE: dict[str, Garbage] = {
    "as asked": lambda good: good,
    "a thought first": lambda good: f"<think>\nIs it 1, or {{}}?\n</think>\n\n{good}",
    "a thought that the prompt opened": lambda good: f"Is it 1?\n</think>\n{good}",
    "a block of code": lambda good: f"```json\n{good}\n```",
}


class Answers:
    """Answers requests one after another, then always with the last; counts them. For a server and for an engine."""

    def __init__(self) -> None:
        self.script: list[tuple[str, bool]] = []  # each with whether it was cut off
        self.num_asked = 0

    def set(self, *answers: str, is_cut: bool = False) -> None:
        self.script, self.num_asked = [(answer, is_cut) for answer in answers], 0

    def next(self) -> tuple[str, bool]:
        self.num_asked += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def serve(self, request: dict[str, Any], number: int) -> Reply:
        text, is_cut = self.next()
        choice = {"message": {"content": text}, "finish_reason": "length" if is_cut else "stop"}
        return 200, {}, json.dumps({"choices": [choice], "usage": {"total_tokens": 7}}).encode()

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        text, is_cut = self.next()
        written = list(TOKENIZER.encode(text)) + ([] if is_cut else [TOKENIZER.eos_token_id])
        engine = engine_of(lambda *_: written or [TOKENIZER.eos_token_id], max_tokens=8192)
        found = await engine.generate(tokens, sampling)
        return replace(found, finish_reason="length" if is_cut else "stop")


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def server(answers: Answers) -> Iterator[ScriptedJudge]:
    with ScriptedJudge(answers.serve) as judge:
        yield judge


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("slipstream.envhub.rewards.judge.MAX_KEPT", 0)


def part_of(kind: str, compare: str, server: ScriptedJudge, answers: Answers) -> Part:
    """A judge that sends one request at a time."""
    own = {"url": "actors", "request": {"temperature": 0, "max_tokens": 4000}}
    settings: dict[str, Any] = {"part": "judge", "rubric": RUBRIC, "max_concurrent": 1}
    settings |= {"url": server.url, "model": "m"} if kind == "url" else own
    (part,) = parts_of("env.rewards", {"good": settings | ({} if compare == "episode" else {"compare": compare})})
    policy = OwnJudge(sampler=answers, tokenizer=TOKENIZER, model=ModelConfig(max_tokens=8192))
    judge_by(policy, {"shop": [part]})
    return part


def marked(part: Part) -> list[float]:
    if part.compare:
        ((_, judge),) = group_parts([part])
        return compared(judge, shown("4", "9"))
    found: Any = asyncio.run(part.values(episode_of(turn_of("4")), timeout_s=60.0))
    return [found.value if isinstance(found, Reading) else found]


def num_counted(part: Part) -> int:
    return judge_of(part).client.num_requests  # type: ignore[union-attr]


@pytest.mark.parametrize("compare", COMPARE)
@pytest.mark.parametrize("kind", ["url", "own"])
def test_every_answer_of_every_kind_of_judge_ends_in_a_mark_or_in_a_retry_that_is_counted(
    kind: str, compare: str, server: ScriptedJudge, answers: Answers
) -> None:
    good, marks = COMPARE[compare]
    scripts = {name: [readable(good)] for name, readable in READABLE.items()}
    scripts |= {name: [garbage(good), good] for name, garbage in MALFORMED.items()}
    for name, script in scripts.items():
        part = part_of(kind, compare, server, answers)
        answers.set(*script)
        assert marked(part) == marks, name
        assert num_counted(part) == answers.num_asked == len(script), name
    for name, garbage in MALFORMED.items():
        part = part_of(kind, compare, server, answers)
        answers.set(garbage(good))
        with pytest.raises(EnvError, match=r"3 answers were malformed"):
            marked(part)
        assert num_counted(part) == answers.num_asked == 3, name


@pytest.mark.parametrize("kind", ["url", "own"])
def test_the_beginning_of_a_number_is_not_the_number(kind: str, server: ScriptedJudge, answers: Answers) -> None:
    """A judge that wrote "10", cut off after "1", did not say 1."""
    part = part_of(kind, "episode", server, answers)
    answers.set("1", is_cut=True)
    with pytest.raises(EnvError, match=r"its answer was cut off at `max_tokens` of `request`: '1'"):
        marked(part)
    answers.set('{"clear": 7}\n\n', is_cut=True)
    assert marked(part) == [0.7], "white space alone was cut off"


@pytest.mark.parametrize("num_tokens", ["1000000001", "99999999999999999999999", "-1", "NaN"])
def test_an_impossible_usage_changes_no_account(redis_client: redis.Redis, run_id: str, num_tokens: str) -> None:
    def serve(request: dict[str, Any], number: int) -> Reply:
        used = num_tokens if number < 2 else "5"
        reply = {"choices": [{"message": {"content": COMPARE["episode"][0]}}], "usage": {"total_tokens": "USED"}}
        return 200, {}, json.dumps(reply).replace('"USED"', used).encode()

    account = JudgeAccount(redis_client, run_id)
    with ScriptedJudge(serve) as server:
        settings = {"url": server.url, "model": "m", "rubric": RUBRIC, "max_total_tokens": 100}
        parts = parts_of("env.rewards", {"judge": settings})
        book_on(account.add, [parts])
        account.add("env.rewards.judge", 0, 90, 0.0)
        assert marked(parts[0]) == [0.7]
    assert account.add("env.rewards.judge", 0, 0, 0.0) == (3, 95, 0.0)
