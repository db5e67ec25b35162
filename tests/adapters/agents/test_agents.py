"""An agent on the OpenAI Agents SDK plays on our endpoint, with a tool. `make test-adapters-agents`.

The package lies in an environment of its own, AGENTS_PYTHON, and this process has none of it.
"""

from pathlib import Path

import pytest

from tests.actors.episode.test_tool_calls import CALL, Writer, turns_of
from tests.adapters.agents.playing import play


@pytest.mark.parametrize("words", [["responses"], ["responses", "stream"], ["chat_completions"]])
@pytest.mark.parametrize("text", [CALL, f"I look. {CALL}"])
def test_its_tool_calls_keep_their_sampled_tokens(words: list[str], text: str, tmp_path: Path) -> None:
    writer = Writer([text, "ab."])
    trajectory = play("looks.py", words, writer, "", tmp_path)
    assert turns_of(trajectory) == writer.written and trajectory.branch_starts == [0]
    assert trajectory.total_reward == 1.0


@pytest.mark.parametrize(("api", "num_branches"), [("responses", 0), ("chat_completions", 1)])
def test_it_sends_thoughts_back_on_the_responses_api_only(api: str, num_branches: int, tmp_path: Path) -> None:
    writer = Writer([f"<think>ab?</think>{CALL}", "<think>ab!</think>ab."])
    trajectory = play("looks.py", [api], writer, "qwen3", tmp_path)
    assert turns_of(trajectory) == writer.written and len(trajectory.branch_starts) == 1 + num_branches
