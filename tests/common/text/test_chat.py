"""A conversation only grows: what was sampled stays, what is new is rendered, and a rewritten past is a new branch."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat, Extension
from slipstream.common.text.codec import end_tokens
from tests.actors.episode.episodes import ids
from tests.common.text.small_tokenizer import CHATML, END, merging_tokenizer

TOKENIZER = merging_tokenizer(CHATML)
SYSTEM = Message("system", "be brief")
ASK = Message("user", "find plain dress")
ANSWER = Message("user", "red small")


def rendered(*messages: Message) -> list[int]:
    """What the template makes of the whole conversation at once."""
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return ids(TOKENIZER, TOKENIZER.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def test_a_tokenizer_file_that_asks_for_truncation_and_padding_gets_neither(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    on_disk = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    on_disk.enable_truncation(4)
    on_disk.enable_padding(length=400)
    on_disk.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(AutoTokenizer.from_pretrained(tmp_path))
    assert chat.open((SYSTEM, ASK)) == rendered(SYSTEM, ASK)
    chat.reply(ids(TOKENIZER, f"search[red]{END}"))
    assert len(chat.extend((Message("user", "x" * 300),)).tokens) > 300


@pytest.mark.parametrize(
    ("sampled", "action", "rendered_end"),
    [
        (f"click[red]{END}", "click[red]", ""),  # what was sampled is not rendered again
        ("click[re", "click[re", END),  # cut by length
        ("click[red]<|endoftext|>", "click[red]", END),  # ended with another special token
    ],
)
def test_the_end_of_turn_is_rendered_unless_it_was_sampled(sampled: str, action: str, rendered_end: str) -> None:
    chat = Chat(TOKENIZER)
    chat.open((ASK,))
    assert chat.reply(ids(TOKENIZER, sampled)) == action
    extension = chat.extend((ANSWER,))
    added = f"{rendered_end}\n<|im_start|>user\nred small{END}\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(extension.tokens) == added and not extension.new_branch


@pytest.mark.parametrize("content", ['{"eos_token_id": [1', "[]", "null", "\xff"])
def test_a_damaged_generation_config_is_named(tmp_path: Path, content: str) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"generation_config\.json is damaged: .*; download it again, or write \{\}"):
        end_tokens(tokenizer)


def conversation(chat: Chat, num_turns: int) -> list[Extension]:
    """The extensions of a conversation in which the policy writes the number of its turn."""
    chat.open((SYSTEM, ASK))
    extensions = []
    for turn in range(num_turns):
        chat.reply(ids(TOKENIZER, f"click[{turn}]{END}"))
        extensions.append(chat.extend((Message("user", f"seen {turn}"),)))
    return extensions


def test_a_window_drops_the_oldest_turns_and_begins_a_branch_that_the_template_renders() -> None:
    extensions = conversation(Chat(TOKENIZER, model=ModelConfig(context="window", max_tokens=600)), 30)
    length, windows, kept_from = len(rendered(SYSTEM, ASK)), [], 0
    for turn, extension in enumerate(extensions):
        length += len(ids(TOKENIZER, f"click[{turn}]")) + 1 + len(extension.tokens)
        if not extension.new_branch:
            assert length <= 450  # three quarters
            continue
        said = [(Message("assistant", f"click[{each}]"), Message("user", f"seen {each}")) for each in range(turn + 1)]
        fitting = [rendered(SYSTEM, ASK, *chain(*said[first:])) for first in range(kept_from, turn + 1)]
        longest = next(tokens for tokens in fitting if len(tokens) <= 300)
        assert extension.tokens == longest
        kept_from += fitting.index(longest)
        windows.append(turn)
        length = len(extension.tokens)
    assert len(windows) >= 3 and kept_from > windows[0]


def test_a_window_keeps_the_last_turn_even_if_it_takes_more_than_half() -> None:
    chat = Chat(TOKENIZER, model=ModelConfig(context="window", max_tokens=300))
    chat.open((SYSTEM, ASK))
    for content, new_branch in (("x" * 200, False), ("y" * 200, True), ("z" * 200, True)):
        chat.reply(ids(TOKENIZER, f"click[a]{END}"))
        extension = chat.extend((Message("user", content),))
        assert extension.new_branch is new_branch
        said = (Message("assistant", "click[a]"), Message("user", content))
        assert not new_branch or extension.tokens == rendered(SYSTEM, ASK, *said)


def newest(messages: tuple[Message, ...]) -> list[Message]:
    return [Message("system", f"{len(messages)} messages were cut"), messages[-1]]


def cuts_to_the_answer(messages: tuple[Message, ...]) -> list[Message]:
    return list(messages[:-1])


def cuts_all(messages: tuple[Message, ...]) -> list[Message]:
    return []


def test_a_function_of_the_users_shortens_a_conversation() -> None:
    model = ModelConfig(context="tests.common.text.test_chat:newest", max_tokens=400)
    extensions = conversation(Chat(TOKENIZER, model=model), 12)
    first = next(turn for turn, extension in enumerate(extensions) if extension.new_branch)
    shown = (Message("system", f"{4 + 2 * first} messages were cut"), Message("user", f"seen {first}"))
    assert extensions[first].tokens == rendered(*shown)
    assert not extensions[first + 1].new_branch


def test_the_function_of_the_page_keeps_its_notes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def notes" in code]
    defined: dict[str, Any] = {}
    exec(code, defined)
    sold_out = Message("user", "red is SOLD OUT")
    last = (Message("assistant", "click[a]"), ANSWER)
    notes = Message("user", "Your notes: red is SOLD OUT")
    assert defined["notes"]((SYSTEM, ASK, sold_out, *last)) == [SYSTEM, notes, *last]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [("cuts_all", r"must return a list of Message, got \[\]"), ("cuts_to_the_answer", "end with the assistant's")],
)
def test_a_function_that_returns_no_conversation_is_refused(function: str, complaint: str) -> None:
    model = ModelConfig(context=f"tests.common.text.test_chat:{function}", max_tokens=400)
    with pytest.raises(ValueError, match=complaint):
        conversation(Chat(TOKENIZER, model=model), 8)
