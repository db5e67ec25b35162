"""The servers and their tools: what a call changes, what it is refused for, and when errands are done."""

import asyncio
import json
from typing import Any

import pytest

from slipstream.envhub.tools.servers import TOOLS, Servers, call_tool
from slipstream.envhub.tools.tools import ToolsState, ToolsWorld, make_tools, make_tools_env
from tests.envhub.env_cases import act, task_of

SERVERS = Servers(
    accounts={"rent": 500, "savings": 1000},
    events={"lunch": ("monday", 12), "demo": ("friday", 9)},
    addresses={"Ada": "ada@x.example"},
    notes={"ideas": "amber dune"},
)


def call(name: str, **arguments: object) -> tuple[str, Servers]:
    return call_tool(SERVERS, name, arguments)


def test_a_look_up_changes_nothing() -> None:
    for name, arguments, said in (
        ("bank.list", {}, "rent, savings"),
        ("bank.balance", {"account": "rent"}, "500"),
        ("calendar.list", {"day": "monday"}, "12:00 lunch"),
        ("calendar.list", {"day": "tuesday"}, "free"),
        ("mail.find", {"person": "Ada"}, "ada@x.example"),
        ("notes.list", {}, "ideas"),
        ("notes.read", {"title": "ideas"}, "amber dune"),
    ):
        assert call_tool(SERVERS, name, arguments) == (said, SERVERS)


def test_each_change_changes_what_it_says() -> None:
    paid = call("bank.transfer", source="rent", target="savings", amount=500)[1]
    assert paid.accounts == {"rent": 0, "savings": 1500}
    assert call("calendar.add", title="tour", day="monday", hour=8)[1].events["tour"] == ("monday", 8)
    assert call("calendar.move", title="lunch", day="monday", hour=13)[1].events["lunch"] == ("monday", 13)
    assert call("calendar.cancel", title="lunch")[1].events == {"demo": ("friday", 9)}
    assert call("mail.send", address="ada@x.example", text="hi")[1].sent == (("ada@x.example", "hi"),)
    assert call("notes.write", title="ideas", text="new")[1].notes == {"ideas": "new"}
    assert call("notes.delete", title="ideas")[1].notes == {}


def test_an_impossible_call_is_refused() -> None:
    for name, arguments, why in (
        ("bank.transfer", {"source": "rent", "target": "savings", "amount": 501}, "rent holds less than 501"),
        ("bank.transfer", {"source": "rent", "target": "rent", "amount": 1}, "the same account"),
        ("bank.balance", {"account": "gold"}, "no account gold"),
        ("calendar.move", {"title": "lunch", "day": "friday", "hour": 9}, "is taken by demo"),
        ("calendar.add", {"title": "lunch", "day": "friday", "hour": 10}, "already exists"),
        ("mail.send", {"address": "eve@x.example", "text": "hi"}, "no mail box"),
        ("bank.rob", {}, "no tool bank.rob"),
    ):
        with pytest.raises(ValueError, match=why):
            call_tool(SERVERS, name, arguments)


def test_arguments_must_match_their_schema() -> None:
    for arguments, why in (
        ({"title": "x", "day": "sunday", "hour": 9}, "arguments.day must be one of monday"),
        ({"title": "x", "day": "monday", "hour": "9"}, "arguments.hour must be of type integer"),
        ({"title": "x", "day": "monday", "hour": True}, "arguments.hour must be of type integer"),
        ({"title": "x", "day": "monday", "hour": 7}, "arguments.hour is out of range"),
        ({"title": "x" * 41, "day": "monday", "hour": 8}, "arguments.title is longer than 40"),
        ({"title": "x", "day": "monday"}, "arguments lacks hour"),
        ({"title": "x", "day": "monday", "hour": 8, "room": 3}, "arguments has an unknown key 'room'"),
    ):
        with pytest.raises(ValueError, match=why):
            call_tool(SERVERS, "calendar.add", arguments)


def test_no_server_grows_without_limit() -> None:
    servers = SERVERS
    for number in range(200):
        try:
            servers = call_tool(servers, "notes.write", {"title": str(number), "text": "x"})[1]
            servers = call_tool(servers, "mail.send", {"address": "ada@x.example", "text": "x"})[1]
        except ValueError:
            break
    assert len(servers.notes) == 100


def world(index: int, errands: int = 3) -> ToolsWorld:
    return make_tools(task_of("tools", index), num_errands=errands)


def do(world: ToolsWorld, state: ToolsState, *calls: tuple[str, dict[str, Any]]) -> ToolsState:
    for name, arguments in calls:
        state = act(world, json.dumps({"name": name, "arguments": arguments}), state).state
    return state


def score(world: ToolsWorld, state: ToolsState) -> float:
    return act(world, "done", state).score


def test_errands_may_be_done_in_any_order_but_all_are_required() -> None:
    for index in range(20):
        three = world(index)
        backwards = [call for errand in reversed(three.errands) for call in errand.calls]
        assert score(three, do(three, three.first, *backwards)) == 1.0
        assert score(three, do(three, three.first, *three.errands[0].calls)) == 0.0
        assert score(three, three.first) == 0.0


def test_an_extra_change_gives_score_0() -> None:
    one = world(0)
    done = do(one, one.first, *one.calls)
    assert score(one, done) == 1.0
    assert score(one, do(one, done, ("notes.write", {"title": "mine", "text": "x"}))) == 0.0


def test_the_opening_lists_every_tool_with_its_schema() -> None:
    opening = asyncio.run(make_tools_env().reset(task_of("tools")))
    listed = [json.loads(line) for line in opening.messages[0].content.splitlines()[1:]]
    assert [tool["name"] for tool in listed] == list(TOOLS)
    assert listed[2]["inputSchema"]["required"] == ["source", "target", "amount"]
