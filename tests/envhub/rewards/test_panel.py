"""Several judges of one episode or group: their marks become one, and their agreement is recorded."""

import asyncio
import re
from typing import Any

import msgspec
import pytest

from slipstream.actors.host.judging import verdict_of
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.panel import combined
from slipstream.envhub.rewards.part import check_keys, group_parts, parts_of
from slipstream.replay.records.ticket import Lease
from tests.actors.scripted_judge import Reply, Serve, completion, impatient, serve
from tests.envhub.rewards.test_group_judge import RUBRIC, marks_of_digits
from tests.envhub.rewards.test_rewards import episode_of, reward_of, turn_of
from tests.replay.records.attempts import attempt_at, ticket

__all__ = ["impatient", "serve"]  # fixtures

URLS = dict.fromkeys(("a", "b"), "http://127.0.0.1:1/v1")


def panel(urls: dict[str, str], **settings: Any) -> dict[str, Any]:
    judges = {name: {"url": url, "model": "m", "rubric": RUBRIC} for name, url in urls.items()}
    return {"liked": {"part": "panel", "judges": judges, **settings}}


def always(mark: float) -> Any:
    def answer(request: dict[str, Any], number: int) -> Reply:
        return completion(f'{{"clear": {10 * mark}}}')

    return answer


@pytest.mark.parametrize(
    ("combine", "marks", "value"),
    [
        ("mean", [0.0, 0.5, 1.0, 1.0], 0.625),
        ("median", [0.0, 0.1, 1.0], 0.1),
        ("median", [0.0, 0.2, 0.4, 1.0], 0.3),
        ("majority", [0.5, 0.9, 0.0], 1.0),
        ("majority", [0.4, 0.9, 0.0], 0.0),
        ("majority", [0.4, 0.9], 0.5),
    ],
)
def test_marks_become_one(combine: str, marks: list[float], value: float) -> None:
    assert combined({str(number): mark for number, mark in enumerate(marks)}, combine, {}).value == pytest.approx(value)


def test_agreement_is_1_where_all_say_the_same_and_0_where_two_are_opposed() -> None:
    """Differences of 0.5, 1 and 0.5 have a mean of 2/3."""
    for marks, agreement in (([0.3, 0.3, 0.3], 1.0), ([0.0, 1.0], 0.0), ([0.0, 0.5, 1.0], 1 / 3)):
        found = combined({str(number): mark for number, mark in enumerate(marks)}, "mean", {})
        assert found.beside["agreement"] == pytest.approx(agreement)


def test_an_episode_has_the_combined_mark_and_what_each_judge_said(serve: Serve) -> None:
    urls = {"a": serve(always(0.2)).url, "b": serve(always(0.8)).url}
    reward = reward_of(panel(urls, weight=2, max=0.4), episode_of(turn_of("hello")))
    assert reward.values == {"liked": 0.4, "liked_a": 0.2, "liked_b": 0.8, "liked_agreement": pytest.approx(0.4)}
    assert reward.rewards[-1]["liked"] == 0.8, "the weighted mark alone, within its limits"


def test_one_judge_of_a_panel_that_fails_fails_the_attempt(serve: Serve) -> None:
    urls = {"a": serve(always(0.2)).url, "b": serve(lambda request, number: (401, {}, b"no")).url}
    with pytest.raises(EnvError, match="refused with status 401"):
        reward_of(panel(urls), episode_of(turn_of("hello")))


def test_a_group_is_compared_by_a_panel(serve: Serve) -> None:
    servers = {"a": serve(marks_of_digits), "b": serve(lambda request, number: completion('{"1": 0, "2": 0}'))}
    parts = group_parts(parts_of("env.rewards", panel({n: s.url for n, s in servers.items()}, compare="listwise")))
    lease = Lease(ticket=ticket(0), fence=1, missing={0: 0, 1: 0}, partials={}, ttl_s=1.0)
    members = []
    for member, reply in enumerate(("4", "10")):
        text = f'{{"conversation": [{{"role": "assistant", "content": "{reply}"}}], "columns": {{}}}}'
        members.append(msgspec.structs.replace(attempt_at(lease, member, run_id="run"), shown=text))
    verdict = asyncio.run(verdict_of(members, parts, judge="j"))
    assert [marks.values for marks in verdict.members] == [
        {"liked": 0.2, "liked_a": 0.4, "liked_b": 0.0, "liked_agreement": 0.6},
        {"liked": 0.5, "liked_a": 1.0, "liked_b": 0.0, "liked_agreement": 0.0},
    ]
    assert [marks.rewards for marks in verdict.members] == [{"liked": 0.2}, {"liked": 0.5}]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"combine": "best"}, "`env.rewards.liked.combine` must be mean, median, majority, got 'best'"),
        ({"combine": ["mean"]}, "`env.rewards.liked.combine` must be mean, median, majority, got ['mean']"),
        ({"judges": {}}, "`env.rewards.liked.judges` must map 2 to 8 names to the settings of a judge"),
        ({"judges": {"a": {}}}, "must map 2 to 8 names"),
        ({"judges": {"a": 1, "b": 2}}, "must map 2 to 8 names"),
        ({"judges": {"a": {"url": "x"}, "b": {}}}, "`env.rewards.liked.judges.a`: missing a required"),
        ({"url": "http://x"}, "unexpected keyword argument 'url'; the keys of a panel are"),
        ({"compare": "listwise", "only_if": "success"}, "has no only_if or success_from"),
    ],
)
def test_a_malformed_panel_is_named(change: dict[str, Any], complaint: str) -> None:
    settings = panel(URLS)
    settings["liked"] |= change
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parts_of("env.rewards", settings)


def test_names_of_a_panel_are_not_those_of_parts_and_each_judge_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"`env.rewards.liked_b`: a judge or a panel records something under this"):
        parts_of("env.rewards", panel(URLS) | {"liked_b": {"part": "format"}})
    with pytest.raises(ConfigError, match=r"`env\.rewards\.liked_b_c`: a judge or a panel records something"):
        both = panel({"a": URLS["a"], "b_c": URLS["b"]})
        parts_of("env.rewards", both | {"liked_b": panel({"a": URLS["a"], "c": URLS["b"]})["liked"]})
    settings = panel(URLS)
    settings["liked"]["judges"]["b"]["key_env"] = "JUDGE_KEY"
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        check_keys({"shop": parts_of("env.rewards", settings)})
    settings["liked"]["compare"] = "listwise"
    compared = {"shop": parts_of("env.rewards", settings)}
    check_keys(compared)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        check_keys(compared, of_groups=True)
