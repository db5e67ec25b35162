"""Each way to write an action: asked for, written and parsed from the same constants."""

import time

import pytest

from slipstream.actors.episode.actions import with_instructions
from slipstream.common.records.message import Message
from slipstream.common.text.action_format import FORMATS, ActionFormat, ParsedAction
from tests.common.text.small_tokenizer import shop_tokenizer

every_format = pytest.mark.parametrize("action_format", FORMATS.values(), ids=FORMATS)


@every_format
@pytest.mark.parametrize("action", ["search[red dress]", "click[< prev]", "take mug 1 from shelf 2"])
def test_what_is_written_is_parsed_back(action_format: ActionFormat, action: str) -> None:
    assert action_format.opening in action_format.instructions and action_format.closing in action_format.instructions
    parsed = action_format.parse(action_format.write(action))
    assert (parsed.text, parsed.valid) == (action, True)


@every_format
def test_a_block_in_an_action_does_not_end_it(action_format: ActionFormat) -> None:
    action = "edit x.py 1-2\n```python\nx = '</p>'\n```"
    assert action_format.parse(f"Thought: so.\n{action_format.write(action)}").text.endswith(action)
    if action_format.opening:
        two = f"{action_format.write('look')} and then\n```\nnothing\n```"
        assert action_format.parse(two).text == "look"


@every_format
def test_many_openings_are_read_at_once(action_format: ActionFormat) -> None:
    began = time.process_time()
    action_format.parse(action_format.opening * 20_000 + "<" * 20_000)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_survives_a_tokenizer_of_words(name: str) -> None:
    tokenizer = shop_tokenizer(name)
    written = tokenizer.decode(tokenizer.encode(FORMATS[name].write("click[red]"), add_special_tokens=False))
    parsed = FORMATS[name].parse(written)
    assert (parsed.text.replace(" ", ""), parsed.valid) == ("click[red]", True)


def test_the_last_action_counts_and_white_space_around_it_does_not() -> None:
    tag, react = FORMATS["action_tag"], FORMATS["react"]
    assert tag.parse("<action>click[red]</action> no, <action>\n click[blue] </action>").text == "click[blue]"
    assert react.parse("Thought: red.\nAction:\n```\nclick[red]\n```").text == "click[red]"
    assert FORMATS["plain"].parse("  click[red]\n").text == "click[red]"


@pytest.mark.parametrize(
    ("name", "completions"),
    [
        ("plain", ["", "  \n"]),
        ("action_tag", ["click[red]", "<action>click[red]", "click[red]</action>", "<action> </action>"]),
        ("action_tag", ["Action: ```click[red]```"]),
        ("react", ["Action: click[red]", "```click[red]```", "<action>click[red]</action>"]),
    ],
)
def test_what_is_not_in_the_format_is_invalid_and_empty(name: str, completions: list[str]) -> None:
    for completion in completions:
        assert FORMATS[name].parse(completion) == ParsedAction(text="", valid=False), completion


def test_the_instructions_go_into_the_system_message() -> None:
    tag = FORMATS["action_tag"]
    rule = "Think first, in a few words. Write exactly one action as <action>your action</action>."
    system, user = Message("system", "You shop."), Message("user", "find dress")
    assert with_instructions((user,), tag) == (Message("system", rule), user)
    assert with_instructions((system, user), tag) == (Message("system", f"You shop.\n{rule}"), user)
    assert with_instructions((user,), FORMATS["plain"]) == (user,)
