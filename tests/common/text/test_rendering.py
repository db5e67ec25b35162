"""What siblings share is rendered and encoded once, and no conversation gets the text or the tokens of another."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat
from slipstream.common.text.chat_template import turn_marks
from slipstream.common.text.codec import KEPT_TEXTS, MAX_KEPT_CHARS, encoder
from tests.common.text.small_tokenizer import CHATML, END, merging_tokenizer

EVERYTHING = "{{ strftime_now('%Y') }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
ASK = Message("user", "find plain dress")
START_S, A_YEAR_S = 1_700_000_000.0, 366 * 86_400.0


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One that no other test has used."""
    return merging_tokenizer.__wrapped__(EVERYTHING)


@pytest.fixture
def renderings(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The conversations that the chat template renders from now on."""
    turn_marks(tokenizer)  # renders some of its own, once
    found, apply = list[Any](), tokenizer.apply_chat_template

    def noted(messages: list[dict[str, str]], **arguments: Any) -> object:
        found.append(messages)
        return apply(messages, **arguments)

    monkeypatch.setattr(tokenizer, "apply_chat_template", noted)
    return found


def one_turn(tokenizer: PreTrainedTokenizerBase, ask: Message = ASK, *, answer: str = "red", **opening: Any) -> str:
    """An episode of one turn; return its whole text."""
    chat = Chat(tokenizer, started_at_s=opening.pop("started_at_s", START_S))
    tokens = chat.open((ask,), **opening)
    sampled = encoder(tokenizer)("click[red]" + END)
    chat.reply(sampled)
    return str(tokenizer.decode(tokens + sampled + chat.extend((Message("user", answer),)).tokens))


def test_siblings_that_see_the_same_render_once(tokenizer: PreTrainedTokenizerBase, renderings: list[Any]) -> None:
    assert len({one_turn(tokenizer, started_at_s=START_S + second, tools=[{"a": 1}]) for second in range(8)}) == 1
    assert [len(messages) for messages in renderings] == [1, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"ask": Message("system", ASK.content)},
        {"ask": Message("user", ASK.content + "!")},
        {"answer": "blue"},
        {"started_at_s": START_S + A_YEAR_S},
        {"tools": [{"a": 1}]},
        {"tools": [{"a": 2}]},
    ],
    ids=str,
)
def test_whatever_differs_is_rendered_anew(tokenizer: PreTrainedTokenizerBase, other: dict[str, Any]) -> None:
    fresh = merging_tokenizer(EVERYTHING)
    for tools in ((), [{"a": 3}]):
        one_turn(tokenizer, tools=tools)
    assert one_turn(tokenizer, **other) == one_turn(fresh, **other) != one_turn(tokenizer)


def test_another_template_or_tokenizer_shares_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    before = one_turn(tokenizer)
    tokenizer.chat_template = CHATML
    assert one_turn(tokenizer) == one_turn(merging_tokenizer(CHATML)) != before


@pytest.mark.parametrize(("length", "num_renderings"), [(1, 2), (MAX_KEPT_CHARS, 3), (MAX_KEPT_CHARS + 1, 4)])
def test_long_conversations_are_rendered_and_encoded_as_short_ones(
    tokenizer: PreTrainedTokenizerBase, renderings: list[Any], length: int, num_renderings: int
) -> None:
    texts = [one_turn(tokenizer, Message("user", "x" * length)) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].count("x") == length
    assert len(renderings) == num_renderings


def test_kept_tokens_belong_to_the_caller(tokenizer: PreTrainedTokenizerBase) -> None:
    encode = encoder(tokenizer)
    first = encode("red small")
    expected = list(first)
    first.append(0)
    assert encode("red small") == encoder(tokenizer)("red small") == expected


def test_texts_beyond_those_that_are_kept_are_right_too(tokenizer: PreTrainedTokenizerBase) -> None:
    encode = encoder(tokenizer)
    texts = [f"item {number}" for number in range(KEPT_TEXTS + 8)]
    for _ in range(2):
        for text in texts:
            assert encode(text) == tokenizer.encode(text, add_special_tokens=False)
