"""Half a surrogate pair in a text of the policy: every type that carries such text makes it valid, at every border."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slipstream.actors.engine.orders import Parsed
from slipstream.actors.episode.answer import CheckedEnv
from slipstream.common.records.message import Message, valid_json, valid_text
from slipstream.common.records.tool_call import ParsedAnswer, ToolCall, written_call
from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.action_format import ParsedAction, called
from slipstream.envhub.agent.endpoint import _tool_calls
from slipstream.envhub.agent.request import ChatRequest, decoded, template_messages
from slipstream.envhub.agent.response import Answer, Answers
from slipstream.envhub.agent.responses import ResponsesRequest, events, response_body
from slipstream.envhub.env import Observation
from tests.actors.tool_parsing import LOOK, parsing

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=8)
HALF = "\ud83d"
ESCAPED = "\\ud83d"


def test_half_a_pair_is_replaced_and_a_whole_pair_is_one_character() -> None:
    assert valid_text("plain") == "plain"
    assert valid_text("naïve \U0001f600") == "naïve \U0001f600"
    assert valid_text(f"a{HALF}b\udc00c\ud83d\ude00") == "a\ufffdb\ufffdc\U0001f600"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"at":  "x"}', '{"at":  "x"}'),
        ('{"at":  "\\ud83d\\ude00"}', '{"at":  "\\ud83d\\ude00"}'),
        ('{"at":  "\\\\ud83d"}', '{"at":  "\\\\ud83d"}'),
        ('{"at":  "\\ud83d"}', '{"at": "\ufffd"}'),
        ('{"at":  "\\uDC00 \\u00e9"}', '{"at": "\ufffd \u00e9"}'),
        (f'{{"at":  "{HALF}"}}', '{"at":  "\ufffd"}'),
        ('{"at": "\\ud83d', '{"at": "\\ud83d'),
        ("[" * 100_000 + "\\ud83d", "[" * 100_000 + "\\ud83d"),
    ],
    ids=["plain", "a pair", "a backslash", "half", "other half", "not escaped", "no JSON", "too deep"],
)
def test_json_is_written_again_only_if_its_reader_would_get_half_a_pair(text: str, valid: str) -> None:
    assert valid_json(text) == valid


def answered() -> ParsedAnswer:
    call = ToolCall(name=f"lo{HALF}ok", arguments=json.dumps({"at": HALF}))
    return ParsedAnswer(reasoning=HALF, content=HALF, tool_calls=[call], malformed=False)


def streamed() -> list[bytes]:
    found = answered()
    sampled = {"tokens": [2], "pieces": [], "logprobs": [-0.5], "finish_reason": "tool_calls"}
    calls = _tool_calls([1], [2], found.tool_calls)
    shown = Answer(text=found.content, reasoning=found.reasoning, tool_calls=calls, **sampled)
    chunks = Answers(answers=[shown], num_prompt_tokens=1).chunks(with_usage=True)
    return [*chunks, *events(response_body(ResponsesRequest(input="hi"), shown, num_prompt_tokens=1))]


class Echo:
    """An environment of a user's, whose texts have what a policy wrote."""

    async def step(self, action: str) -> Observation:
        return Observation(messages=(Message("user", f"nothing is called {HALF}"),), rewards={"right": 0.0})

    def state_key(self) -> str:
        return HALF

    def admissible(self) -> list[str]:
        return [f"open {HALF}"]


ECHO = CheckedEnv(Echo(), timeout_s=5.0)  # type: ignore[arg-type]


def requested(body: object) -> Any:
    return template_messages(decoded(json.dumps(body).encode(), ChatRequest, SAMPLING).messages)


COMES_BACK = {"function": {"name": "look", "arguments": '{"at": "\\ud83d"}'}}
# Every border that a policy's text crosses: what comes out can be encoded, and so can what a reader of its JSON gets.
BORDERS: dict[str, Callable[[], Any]] = {
    "the engine's process": lambda: msgspec.msgpack.encode(Parsed(call=1, answer=answered())),
    "a call of a tool": lambda: called(msgspec.structs.replace(answered()), as_text=False).text,
    "an action": lambda: ParsedAction(text=HALF, valid=True).text,
    "arguments": lambda: json.loads(answered().tool_calls[0].arguments),
    "streams": streamed,
    "a call that is written": lambda: written_call({"name": "look", "arguments": json.dumps({"at": HALF})}),
    "a request": lambda: requested({"messages": [{"role": "user", "content": HALF}]}),
    "a call that comes back": lambda: requested({"messages": [{"role": "assistant", "tool_calls": [COMES_BACK]}]}),
    "an observation": lambda: asyncio.run(ECHO.step("")),
    "a state": lambda: ECHO.state_key(),
    "a listed action": lambda: asyncio.run(ECHO.admissible()),
    "a message to a judge": lambda: msgspec.json.encode([Message("user", HALF)]),
}


@pytest.mark.parametrize("border", BORDERS)
def test_no_border_lets_half_a_pair_through(border: str) -> None:
    made = BORDERS[border]()
    assert HALF not in str(made) and ESCAPED not in repr(made).replace("\\\\", "\\")
    msgspec.msgpack.encode(made)


# The replies of shared/cases/half_character, as hermes's parser reads them.
@pytest.mark.parametrize(
    ("reply", "name", "malformed"),
    [
        ('<tool_call>\n{"name": "look", "arguments": {"at": "\\ud83d"}}\n</tool_call>', "look", False),
        ('<tool_call>\n{"name": "lo\\ud83dok", "arguments": {}}\n</tool_call>', "lo\ufffdok", True),
    ],
)
def test_an_engine_answers_a_call_with_half_a_pair(reply: str, name: str, malformed: bool) -> None:
    found = asyncio.run(parsing()(reply, tokens=[1], prompt=[1], tools=[LOOK]))
    assert (found.tool_calls[0].name, found.malformed) == (name, malformed)
    sent = msgspec.msgpack.encode(Parsed(call=1, answer=found))
    assert msgspec.msgpack.decode(sent, type=Parsed).answer == found
    if not malformed:
        assert json.loads(found.tool_calls[0].arguments) == {"at": "\ufffd"}
