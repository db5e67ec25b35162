"""A program is found in a block of any language, or is all of the text."""

import pytest

from slipstream.envhub.isolation.program import program_in


@pytest.mark.parametrize("label", ["", "python", "py", "python3", "Python", "text"])
def test_the_program_is_what_stands_in_the_first_block(label: str) -> None:
    assert program_in(f"So:\n```{label}\nprint(1)\n```\nor\n```\nprint(2)\n```") == "print(1)\n"


@pytest.mark.parametrize("text", ["print(1)", "print('```')", "```python\nprint(1)"])
def test_without_a_whole_block_the_program_is_all_of_the_text(text: str) -> None:
    assert program_in(text) == text


@pytest.mark.parametrize("text", ["", "\ud800", "x" * 20_001, "```python\n```"])
def test_what_cannot_be_run_is_no_program(text: str) -> None:
    assert program_in(text) == ""
