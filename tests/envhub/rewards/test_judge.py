"""A judge behind a URL: what it is asked, how its answer is read, and what every kind of failure of it becomes."""

import asyncio
import base64
import gzip
import json
import logging
import re
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import check_keys, parts_of
from tests.actors.scripted_judge import Reply, ScriptedJudge, Serve, completion, impatient, serve
from tests.envhub.rewards.test_rewards import episode_of, turn_of

__all__ = ["impatient", "serve"]  # fixtures

RUBRIC = {"text": "You mark answers.", "scale": [0, 10], "criteria": {"clear": "It is clear.", "right": "It is right."}}
GOOD = completion('{"clear": 5, "right": 10}')
DEADLINE_S = 60.0
KEY = "sk-very+secret/7"


def judge_at(url: str, **settings: Any) -> Judge:
    settings = {"url": url, "model": "m", "rubric": RUBRIC, "deadline_s": DEADLINE_S, **settings}
    (part,) = parts_of("env.rewards", {"judge": settings})
    assert isinstance(part.measure, Judge)
    return part.measure


def marked(judge: Judge, reply: str = "hello", **columns: Any) -> Any:
    return asyncio.run(judge(episode_of(turn_of(reply), columns=columns))).value


@pytest.fixture
def server(serve: Serve) -> ScriptedJudge:
    return serve(lambda request, number: GOOD)


def reports(usage: dict[str, int] | None) -> Reply:
    body = {"choices": [{"message": {"content": '{"clear": 5, "right": 10}'}}], "usage": usage}
    return 200, {}, json.dumps(body).encode()


def test_an_episode_is_marked_by_the_weighted_mean_of_the_criteria_and_a_long_one_is_cut(server: ScriptedJudge) -> None:
    assert marked(judge_at(server.url)) == 0.75
    (request,) = server.requests
    system, user = request["messages"]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 512)
    assert "- clear: It is clear." in system["content"] and "from 0 to 10" in system["content"]
    shown = json.loads(user["content"])
    assert shown == {"conversation": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "hello"}]}
    weighted = RUBRIC | {"criteria": {"clear": {"text": "x", "weight": 3}, "right": "y"}}
    assert marked(judge_at(server.url, rubric=weighted)) == (3 * 0.5 + 1) / 4
    marked(judge_at(server.url, max_chars=1000), "x" * 5000)
    shown = server.requests[-1]["messages"][1]["content"]
    assert len(shown) < 1100 and "characters are left out" in shown


def test_columns_are_shown_and_one_that_the_task_lacks_fails_the_attempt(server: ScriptedJudge) -> None:
    columns = {"answer": 42, "secret": "x"}
    marked(judge_at(server.url, columns=["answer"], request={"reasoning_effort": "low"}), **columns)
    assert json.loads(server.requests[0]["messages"][1]["content"])["reference"] == {"answer": 42}
    assert server.requests[0]["reasoning_effort"] == "low" and "temperature" not in server.requests[0]
    with pytest.raises(EnvError, match="the task has no column gold to show to the judge; it has answer, secret"):
        marked(judge_at(server.url, columns=["gold"]), **columns)


def test_only_the_only_mark_of_a_rubric_may_be_a_number_alone(serve: Serve) -> None:
    server = serve(lambda request, number: completion(" 3 "))
    assert marked(judge_at(server.url, rubric=RUBRIC | {"scale": [1, 5], "criteria": {"clear": "x"}})) == 0.5
    with pytest.raises(EnvError, match="3 answers were malformed"):
        marked(judge_at(server.url))


@pytest.mark.parametrize(
    "failure",
    [
        None,
        (500, {}, b"out of memory"),
        (429, {"Retry-After": "0"}, b"slow down"),
        (200, {}, b"no JSON"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b'{"choices": [{"message": {"content": null}}]}'),
        (200, {}, b'{"choices": ' + b"[" * 100_000),
        (200, {"Content-Encoding": "gzip"}, gzip.compress(b"0" * 1000, mtime=0)),
        completion("x" * (2 << 20)),
    ],
    ids=lambda failure: "closed" if failure is None else f"{failure[0]}-{failure[2][:30]}",
)
def test_what_may_pass_is_tried_again(serve: Serve, failure: Reply | None) -> None:
    server = serve(lambda request, number: failure if number < 2 else GOOD)
    assert marked(judge_at(server.url)) == 0.75
    assert len(server.requests) == 3


def test_a_server_that_is_away_or_silent_fails_the_attempt_at_the_deadline(serve: Serve) -> None:
    closed = ScriptedJudge(lambda request, number: GOOD)
    closed.close()
    late = r"ClientConnectorError.*another attempt would be too late \(deadline_s is 0.5\)"
    with pytest.raises(EnvError, match=late):
        marked(judge_at(closed.url, deadline_s=0.5))
    released = threading.Event()
    server = serve(lambda request, number: GOOD if released.wait(DEADLINE_S) else None)
    try:
        with pytest.raises(EnvError, match=r"no answer from .* within 1 s \(deadline_s\)"):
            marked(judge_at(server.url, deadline_s=1))
        with pytest.raises(EnvError, match=r"no answer within 0.1 s \(timeout_s\)"):
            marked(judge_at(server.url, deadline_s=1, timeout_s=0.1))
    finally:
        released.set()


def test_a_server_may_say_when_it_wants_to_be_asked_again(serve: Serve) -> None:
    server = serve(lambda request, number: GOOD if number else (429, {"Retry-After": "1"}, b""))
    started = time.monotonic()
    assert marked(judge_at(server.url)) == 0.75
    assert time.monotonic() - started >= 1
    late = serve(lambda request, number: (503, {"Retry-After": formatdate(time.time() + 3600)}, b"closed"))
    with pytest.raises(EnvError, match="another attempt would be too late"):
        marked(judge_at(late.url))
    assert len(late.requests) == 1


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_a_request_that_is_refused_for_good_is_not_repeated(serve: Serve, status: int) -> None:
    server = serve(lambda request, number: (status, {"Location": "http://127.0.0.1:1/"}, b"no such model"))
    with pytest.raises(EnvError, match=f"refused with status {status}: 'no such model'"):
        marked(judge_at(server.url))
    assert len(server.requests) == 1


async def test_equal_requests_at_once_are_asked_once(server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envhub.rewards.judge.MAX_KEPT", 1)
    judge = judge_at(server.url)
    marks = await asyncio.gather(*(judge(episode_of(turn_of("same"))) for _ in range(20)))
    assert [mark.value for mark in marks] == [0.75] * 20 and len(server.requests) == 1
    await judge(episode_of(turn_of("other")))
    await judge(episode_of(turn_of("same")))
    assert len(server.requests) == 3, "the cache has room for one"


async def test_no_more_requests_than_configured_are_open(serve: Serve) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        time.sleep(0.25)
        return GOOD

    server = serve(slow)
    judge = judge_at(server.url, max_concurrent=2, deadline_s=2.5)
    # Two at a time, they take 3 s: the wait for a place does not count.
    marks = await asyncio.gather(*(judge(episode_of(turn_of(str(number)))) for number in range(24)))
    assert [mark.value for mark in marks] == [0.75] * 24
    assert server.most_open == 2


@pytest.mark.parametrize("budget", [{"max_requests": 2}, {"max_total_tokens": 14}])
def test_a_spent_budget_fails_the_attempt_and_names_the_key(server: ScriptedJudge, budget: dict[str, int]) -> None:
    judge = judge_at(server.url, **budget)
    marked(judge, "one")
    marked(judge, "two")
    (name,) = budget
    with pytest.raises(EnvError, match=f"the budget of this process is spent: {name} is"):
        marked(judge, "three")
    assert marked(judge, "one") == 0.75, "the cache costs nothing"
    assert len(server.requests) == 2


def test_a_budget_counts_what_a_server_reports_in_parts_at_its_prices(serve: Serve) -> None:
    """A request costs (1000 * 2 + 100 * 10) / 10^6 = 0.003."""
    server = serve(lambda request, number: reports({"prompt_tokens": 1000, "completion_tokens": 100}))
    judge = judge_at(server.url, max_cost=0.005, input_price=2, output_price=10)
    marked(judge, "one")
    assert judge.client.cost == pytest.approx(0.003)
    marked(judge, "two")
    with pytest.raises(EnvError, match=r"this process is spent: max_cost is 0.005, and it has used 0.006"):
        marked(judge, "three")
    judge = judge_at(server.url, max_total_tokens=1100)
    marked(judge, "one")
    with pytest.raises(EnvError, match="max_total_tokens is 1100, and it has used 1100"):
        marked(judge, "two")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("usage", "budget", "missing"),
    [
        (None, {"max_cost": 1, "input_price": 1}, "`usage`, so the budget cannot be kept; limit max_requests instead"),
        (None, {"max_total_tokens": 5}, "`usage`, so the budget cannot be kept; limit max_requests instead"),
        ({"total_tokens": 1100}, {"max_cost": 1, "input_price": 1}, "prompt_tokens or no completion_tokens in `usage`"),
    ],
)
def test_a_server_that_does_not_report_what_was_used_cannot_keep_a_budget(
    serve: Serve, usage: dict[str, int] | None, budget: dict[str, int], missing: str
) -> None:
    server = serve(lambda request, number: reports(usage))
    with pytest.raises(EnvError, match=f"reports no {missing}"):
        marked(judge_at(server.url, **budget))
    assert marked(judge_at(server.url)) == 0.75


def test_the_key_is_sent_and_never_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", "sk-verysecret")
    (tmp_path / "key").write_text("sk-verysecret\n")
    server = serve(lambda request, number: (500 if number == 0 else 401, {}, b"bad key sk-verysecret, sorry"))
    for named in ({"key_env": "JUDGE_KEY"}, {"key_file": str(tmp_path / "key")}):
        judge = judge_at(server.url, **named)
        with pytest.raises(EnvError, match=r"bad key \*\*\*, sorry") as error:
            marked(judge)
        assert "verysecret" not in f"{error.value} {judge}"
    assert set(server.keys) == {"Bearer sk-verysecret"}
    assert "verysecret" not in caplog.text


ENCODED = {
    "UTF-16": KEY.encode("utf-16-le"),
    "UTF-32": KEY.encode("utf-32-be"),
    "base64": base64.b64encode(KEY.encode()),
    "hex": KEY.encode().hex().encode(),
    "a URL": quote(KEY, safe="").encode(),
    "escapes of JSON": "".join(f"\\u{ord(char):04x}" for char in KEY).encode(),
    "other case": KEY.upper().encode(),
    "spaced": " ".join(KEY).encode(),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_a_key_is_shown_in_no_encoding(
    encoding: str, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = serve(lambda request, number: (401, {}, b"bad key " + ENCODED[encoding]))
    with pytest.raises(EnvError, match=r"status 401: \(not shown: it repeats the key\)"):
        marked(judge_at(server.url, key_env="JUDGE_KEY"))
    assert "bad key" not in caplog.text


def test_a_missing_key_is_named_before_the_first_episode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setenv("BLANK_KEY", " \n")
    (two := tmp_path / "two").write_text("one\ntwo\n")
    settings = {"url": "http://127.0.0.1:1/v1", "model": "m", "rubric": RUBRIC}
    for named, complaint in (
        ({"key_env": "JUDGE_KEY"}, r"`env\.rewards\.judge`: key_env names the environment variable JUDGE_KEY, which"),
        ({"key_env": "BLANK_KEY"}, r"`env\.rewards\.judge`: BLANK_KEY must contain printable ASCII .* got 0 char"),
        ({"key_file": "/no/such/key"}, r"`env\.rewards\.judge`: `key_file` /no/such/key cannot be read"),
        ({"key_file": str(two)}, "two must contain printable ASCII without spaces, got 7 characters"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_keys({"shop": parts_of("env.rewards", {"judge": settings | named})})
    check_keys({"shop": parts_of("env.rewards", {"judge": settings})})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": "127.0.0.1:8000"}, "`env.rewards.judge.url` must be like http://host:8000/v1"),
        ({"url": "http://host:port/v1"}, "`env.rewards.judge.url` must be like http://host:8000/v1"),
        ({"url": "http://me:pw@host/v1"}, "must have no user and password"),
        ({"model": ""}, "`env.rewards.judge.model` must be a name"),
        ({"rubric": "no.yaml"}, "`env.rewards.judge.rubric` no.yaml cannot be read"),
        ({"rubric": {"text": "x"}}, "`env.rewards.judge.rubric`: Object missing required field"),
        ({"rubric": RUBRIC | {"scale": [10, 0]}}, "scale must be two numbers, the lower one first, got [10.0, 0.0]"),
        ({"rubric": RUBRIC | {"criteria": {}}}, "criteria must name at least one"),
        ({"rubric": RUBRIC | {"criteria": {"a": {"text": "x", "weight": 0}}}}, "each with a weight above 0"),
        ({"max_concurrent": 0}, "`env.rewards.judge.max_concurrent` must be a whole number >= 1, got 0"),
        ({"timeout_s": -1}, "`env.rewards.judge.timeout_s` must be > 0, got -1"),
        ({"timeout_s": 10**400}, "`env.rewards.judge.timeout_s` must be > 0, got 1000"),
        ({"max_cost": 1}, "`env.rewards.judge.max_cost` must be 0 without input_price and output_price, got 1"),
        ({"max_cost": -1}, "`env.rewards.judge.max_cost` must be >= 0, got -1"),
        ({"columns": "answer"}, "`env.rewards.judge.columns` must be a list of names, got 'answer'"),
        ({"request": {"model": "other"}}, "`env.rewards.judge.request` must be fields of a request, without model"),
        ({"key_env": "A", "key_file": "b"}, "must be at most one name"),
        ({"modell": "m"}, "`env.rewards.judge`: got an unexpected keyword argument 'modell'; the keys of a judge are"),
    ],
)
def test_a_malformed_setting_is_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        judge_at(**{"url": "http://127.0.0.1:1/v1", **settings})


def test_a_rubric_is_read_from_a_file(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "rubric.yaml").write_text("text: Judge.\nscale: [0, 1]\ncriteria: {clear: It is clear.}\n")
    server = serve(lambda request, number: completion("1"))
    assert marked(judge_at(server.url, rubric=str(tmp_path / "rubric.yaml"))) == 1.0
    (tmp_path / "rubric.yaml").write_text("text: [\n")
    with pytest.raises(ConfigError, match="cannot be read: while"):
        judge_at(server.url, rubric=str(tmp_path / "rubric.yaml"))
