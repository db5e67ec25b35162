"""The agents of docs/examples/foreign play on our endpoint as they are: `make test-adapters-agents`.

Their frameworks lie beside our packages in an environment that runs this file.
"""

from dataclasses import replace

import pytest
from docs.examples.foreign import trl_sums

from slipstream.envhub.catalogue import make_env
from slipstream.tools.lab.soak.scripted_engine import ScriptedEngine
from tests.actors.episode.episodes import engine_of, turns_of
from tests.actors.episode.test_tool_calls import LONG, Writer
from tests.adapters.agents.playing import episode_of
from tests.envhub.env_cases import task_of

ROOM = replace(LONG, max_tokens=20_000)  # smolagents explains itself at length
ASKS = '<tool_call>\n{"name":"price","arguments":{"what":"apples"}}\n</tool_call>'
FINAL = '<tool_call>\n{"name":"final_answer","arguments":{"answer":"3"}}\n</tool_call>'


class LongWriter(Writer):
    def engine(self) -> ScriptedEngine:
        return engine_of(self._write, max_tokens=ROOM.max_tokens)


@pytest.mark.parametrize(
    ("script", "says", "num_branches"),
    [("openai_agents_shop", [ASKS, "3"], 1), ("smolagents_shop", [ASKS, FINAL], 2)],  # smolagents rewrites its history
)
def test_an_agent_asks_for_a_price_and_says_it(script: str, says: list[str], num_branches: int) -> None:
    writer = LongWriter(says)
    trajectory = episode_of({"agent": f"docs.examples.foreign.{script}:play"}, writer, allowance=ROOM)
    assert turns_of(trajectory) == writer.written
    assert trajectory.total_reward == 1.0 and len(trajectory.branch_starts) == num_branches


async def test_a_corridor_of_gymnasium_is_played_in_words() -> None:
    module, scores = "docs.examples.foreign.gymnasium_corridor", []
    for says in ("Left.", "right"):
        env = make_env("gymnasium", {"game": f"{module}:Corridor-v0", "speech": f"{module}:SPEECH"})
        seen = await env.reset(task_of("gymnasium"))
        while not seen.done:
            seen = await env.step(says)
        scores.append(seen.score)
    assert sorted(scores) == [0.0, 1.0]


def test_the_functions_of_a_script_for_trl_give_what_they_say() -> None:
    rows = trl_sums.sums(2)
    answers = [row["answer"] for row in rows]
    assert trl_sums.right([f"It is {answers[0]}", "no idea"], answer=answers) == [1.0, 0.0]
    assert trl_sums.short(["", "abc"]) == [1.0, 0.25]
