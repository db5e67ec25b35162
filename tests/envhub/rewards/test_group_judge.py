"""A judge that compares the members of a group: what it is asked, how its answers are read, and how members tie."""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import group_parts, parts_of
from slipstream.envhub.rewards.sibling_judge import Shown, read_shown, show, sibling_marks
from slipstream.replay.records.ticket import Lease
from tests.actors.scripted_judge import Reply, Serve, completion, impatient, serve
from tests.envhub.rewards.test_rewards import episode_of, reward_of, turn_of
from tests.replay.records.attempts import attempt_at, ticket

__all__ = ["impatient", "serve"]  # fixtures

RUBRIC = {"text": "You compare.", "scale": [0, 10], "criteria": {"clear": "It is clear."}}
UNREACHABLE = {"part": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "rubric": RUBRIC}


def group_judge(url: str, **settings: Any) -> Judge:
    settings = {"part": "judge", "url": url, "model": "m", "rubric": RUBRIC, "compare": "listwise", **settings}
    ((_, judge),) = group_parts(parts_of("env.rewards", {"better": settings}))
    return judge


def shown(*replies: str, **columns: Any) -> list[Shown]:
    prompt = [{"role": "system", "content": "Play."}, {"role": "user", "content": "say"}]
    return [Shown(conversation=[*prompt, {"role": "assistant", "content": said}], columns=columns) for said in replies]


def compared(judge: Judge, members: list[Shown]) -> list[float]:
    return [mark.value for mark in asyncio.run(sibling_marks(judge, members))]


def asked(request: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(request["messages"][1]["content"]))


def replies_of(request: dict[str, Any]) -> dict[str, str]:
    return {number: messages[-1]["content"] for number, messages in asked(request)["episodes"].items()}


def marks_of_digits(request: dict[str, Any], number: int) -> Reply:
    return completion(json.dumps({at: {"clear": int(reply)} for at, reply in replies_of(request).items()}))


def test_a_list_is_marked_in_one_request_and_each_mark_goes_to_its_member(serve: Serve) -> None:
    server = serve(marks_of_digits)
    judge = group_judge(server.url, columns=["answer"])
    assert compared(judge, shown("3", "10", "0", "7", answer=42)) == [0.3, 1.0, 0.0, 0.7]
    (request,) = server.requests
    found = asked(request)
    assert found["reference"] == {"answer": 42}
    assert [message["content"] for message in found["shared_beginning"]] == ["Play.", "say"], "shown once"
    assert sorted(found["episodes"]) == ["1", "2", "3", "4"]
    assert list(replies_of(request).values()) != ["3", "10", "0", "7"], "the order says nothing of the members"
    assert "4 attempts at the same task" in request["messages"][0]["content"]


def test_members_that_said_the_same_are_shown_once_and_get_the_same_mark_as_one_alone_does(serve: Serve) -> None:
    server = serve(marks_of_digits)
    assert compared(group_judge(server.url), shown("3", "8", "3")) == [0.3, 0.8, 0.3]
    assert sorted(replies_of(server.requests[0]).values()) == ["3", "8"]
    assert compared(group_judge(server.url), shown("4")) == [0.4]


def test_a_long_attempt_is_cut_in_its_middle_and_the_others_stay_whole(serve: Serve) -> None:
    server = serve(lambda request, number: completion('{"1": 1, "2": 2}'))
    judge = group_judge(server.url, max_chars=3000)
    compared(judge, shown("short", "x" * 9000))
    assert len(server.requests[0]["messages"][1]["content"]) < 3000
    episodes = asked(server.requests[0])["episodes"].values()
    (cut,) = (each for each in episodes if isinstance(each, str))
    assert "characters are left out" in cut
    assert [{"role": "assistant", "content": "short"}] in list(episodes)


def test_what_an_actor_stores_is_what_a_judge_reads() -> None:
    episode = episode_of(turn_of("hello"), columns={"answer": 42, "secret": "x"})
    stored = show(episode, ["answer"])
    assert "secret" not in stored
    lease = Lease(ticket=ticket(0), fence=1, missing={0: 0}, partials={}, ttl_s=1.0)
    trajectory = attempt_at(lease, 0, run_id="run")
    found = read_shown(msgspec.structs.replace(trajectory, shown=stored))
    assert found.columns == {"answer": 42} and found.conversation == [*episode.messages, *episode.ending]
    for garbage in ("", "{}", "[1]", '{"conversation": 1, "columns": {}}', "[" * 100_000):
        with pytest.raises(EnvError, match="member 0, of actor a, cannot be judged"):
            read_shown(msgspec.structs.replace(trajectory, shown=garbage))
    with pytest.raises(EnvError, match="the task has no column gold to show to the judge; it has answer, secret"):
        show(episode, ["gold"])


def test_a_comparison_adds_nothing_while_the_episode_is_scored_alone() -> None:
    rewards = {"better": UNREACHABLE | {"compare": "listwise"}, "format": {}}
    assert reward_of(rewards, episode_of(turn_of("hello"))).values == {"format": 1.0}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"compare": "triple"}, "`env.rewards.better.compare` must be listwise, got 'triple'"),
        ({"compare": "listwise", "only_if": "success"}, "has no only_if or success_from"),
        ({"compare": "listwise", "success_from": 0.5}, "has no only_if or success_from"),
        ({"compare": "listwise", "model": ""}, "`env.rewards.better.model` must be a name"),
        ({"part": "format", "compare": "listwise"}, "unexpected keyword argument 'compare'"),
    ],
)
def test_a_malformed_comparison_in_the_configuration_is_named(settings: dict[str, Any], complaint: str) -> None:
    base = {} if "part" in settings else UNREACHABLE
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parts_of("env.rewards", {"better": base | settings})
