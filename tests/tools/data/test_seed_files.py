"""The files of OpenManus-RL, AgentInstruct, Agent-FLAN, AgentGym, ToolBench and GAIA, each by each verb.

The texts are ours; keys, nesting and marks are theirs. A parquet file has the nulls that Arrow adds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.trajectory import Task
from slipstream.common.text.dialogue import Tokeniser
from slipstream.envhub.catalogue import make_env
from slipstream.tools.cli.cli import main
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.tools.data.test_row_formats import Row, as_json, as_jsonl, as_parquet, read

FILES: dict[str, Callable[[Path, list[Row]], Path]] = {"jsonl": as_jsonl, "json": as_json, "parquet": as_parquet}


@dataclass(kw_only=True)
class Form:
    """Rows, and what each verb makes of them: it reads all, or refuses them with a reason that contains these words."""

    rows: list[Row]
    refused: str = ""  # by `data` and `fit sft`; empty: read
    dpo: str = "`return` must be a number"
    learned: tuple[str, ...] = ()  # the text of the tokens that `fit sft` learns, of each row
    env: str = ""  # an environment that plays them
    options: Row = field(default_factory=dict)
    plays: tuple[tuple[int, str, float], ...] = ()  # task, last action, score


def shares(*texts: str) -> list[Row]:
    """AgentInstruct and AgentGym mark every message: people's with null, and the first reply as not to be learned."""
    return [
        {"from": ("human", "gpt")[place % 2], "loss": place > 1 if place % 2 else None, "value": text}
        for place, text in enumerate(texts)
    ]


def flan(*texts: str) -> list[Row]:
    roles = ("system", "user", "assistant", "system", "assistant")
    return [message | {"loss": message["role"] == "assistant"} for message in chat(*zip(roles, texts, strict=False))]


def chat(*texts: tuple[str, str]) -> list[Row]:
    return [{"role": who, "content": text} for who, text in texts]


LS = "Think: I list it.\n\nAct: bash\n\n```bash\nls /srv | wc -l\n```"
ANSWER = "Think: There are three.\n\nAct: answer(3)"
YALE = 'Action: Answer\nFinal Answer: ["Yale"]'
MAY = "You can call weather(town)."
LOOKS = "I look it up.\nweather(town='Bern')"
NOT_MINE = "I have no tool that books flights. I can look up the weather instead."
CRAFT = "Thought:\nI need a plank.\n\nAction:\nget 1 oak log"
CRAFTING = [("system", "You craft."), ("user", "Craft planks."), ("assistant", CRAFT), ("user", "Got 1 oak log")]
END = "<|im_end|>"

NO_PAIR = "neither `chosen` and `rejected` nor `messages`"
SPIDERS = {"task_id": "a-1", "Question": "How many legs have 3 spiders?", "Level": "1", "Final answer": "24"}
OF_GAIA = {"refused": "neither `messages` nor", "dpo": NO_PAIR, "env": "gaia"}

FORMS: dict[str, Form] = {
    "AgentInstruct": Form(
        rows=[
            {"id": "os_0", "conversations": shares("You act.", "Ok?", "How many?", LS, "Output:\n\n3", ANSWER)},
            {"id": "db_0", "conversations": shares("You query MySQL.", "Ok.", "Who won?", YALE)},
        ],
        learned=(f"{LS}{END}{ANSWER}{END}", f"{YALE}{END}"),
        env="dataset",
        options={"conversation": "conversations", "answer": "id", "check": "exact"},
        plays=((0, "os_0", 1.0), (0, "os_1", 0.0)),
    ),
    "Agent-FLAN, with a negative sample of ToolBench": Form(
        rows=[
            {"dataset": "toolbench_tflan", "id": 7, "conversation": flan(MAY, "Warm?", LOOKS, "response: 21", "Yes.")},
            {"dataset": "toolbench_negative", "id": None, "conversation": flan(MAY, "Book me a flight.", NOT_MINE)},
        ],
        learned=(f"{LOOKS}{END}Yes.{END}", f"{NOT_MINE}{END}"),
        env="dataset",
        options={"conversation": "conversation", "answer": "dataset", "check": "exact"},
        plays=((1, "toolbench_negative", 1.0), (1, NOT_MINE, 0.0)),
    ),
    "OpenManus-RL's set": Form(
        rows=[
            {"id": "textcraft_4", "conversations": chat(*CRAFTING)},
            {"id": "os_1", "conversations": chat(("user", "How many?"), ("assistant", ANSWER))},
        ],
        learned=(f"{CRAFT}{END}", f"{ANSWER}{END}"),
    ),
    "AgentGym's trajectories of TextCraft": Form(
        rows=[{"item_id": "textcraft_0", "conversations": shares("You craft.", "OK.", "Goal: planks", CRAFT)}],
        learned=(f"{CRAFT}{END}",),
    ),
    "ToolBench's conversations": Form(
        rows=[
            {
                "id": "Step 2: warm in Bern?",
                "conversations": [
                    {"from": "system", "value": "You are AutoGPT."},
                    {"from": "user", "value": "Is it warm in Bern?"},
                    {"from": "assistant", "value": "Thought: \nAction: weather\nAction Input: {}"},
                    {"from": "function", "value": '{"error": "", "response": "21"}'},
                    {"from": "assistant", "value": "Yes."},
                ],
            }
        ],
        learned=(f"Thought: \nAction: weather\nAction Input: {{}}{END}Yes.{END}",),
    ),
    "OpenManus-RL's TextCraft, in verl's seven columns": Form(
        rows=[
            {
                "data_source": "textcraft",
                "prompt": chat(("user", f"Goal: craft {number} planks.")),
                "ability": "agent",
                "reward_model": {"ground_truth": f"{number} planks", "extra": [1.0] if number else None},
                "extra_info": {"split": "train", "index": number},
                "env_name": "textcraft",
                "item_id": f"textcraft_{number}",
            }
            for number in range(3)
        ],
        refused="rows with only a prompt are tasks",
        dpo=NO_PAIR,
        env="dataset",
        options={"answer": "reward_model.ground_truth"},
        plays=((2, "2 planks", 1.0), (2, "3 planks", 0.0)),
    ),
    "OpenManus-RL's GAIA": Form(
        rows=[
            {"pid": "0", "question": "How many legs have 3 spiders?", "answer": "24", "task_id": "a-1", "level": 1},
            {"pid": "1", "question": "Who, and when?", "answer": "Ada, 1843", "task_id": "a-2", "level": "2"},
        ],
        **OF_GAIA,
        plays=((0, "answer($24)", 1.0), (0, "answer(8)", 0.0), (1, "answer(ada,1843)", 1.0), (1, "answer(Ada)", 0.0)),
    ),
    "GAIA": Form(
        rows=[
            SPIDERS | {"file_name": "", "Annotator Metadata": {"Steps": "1. multiply", "Number of steps": "1"}},
            {"task_id": "a-2", "Question": "Who?", "Level": "2", "Final answer": "Ada", "file_name": None},
        ],
        **OF_GAIA,
        plays=((0, "answer(24.0)", 1.0), (0, "answer(25)", 0.0), (1, "answer(ada)", 1.0)),
    ),
}
OF_FILES = {f"{name}, {ending}": (form, FILES[ending]) for name, form in FORMS.items() for ending in FILES}
PLAYED = [name for name, (form, _) in OF_FILES.items() if form.env]


def written(folder: Path, name: str) -> Path:
    form, as_file = OF_FILES[name]
    ending, rows = name.rpartition(" ")[2], form.rows
    if ending == "parquet" and {type(row.get("level")) for row in rows} == {int, str}:
        rows = [row | {"level": str(row["level"])} for row in rows]  # a column has one type
    return as_file(folder / f"rows.{ending}", rows)


@pytest.mark.parametrize("name", OF_FILES)
def test_data_keeps_rows_or_says_what_they_are(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (form, _), path, kept = OF_FILES[name], written(tmp_path, name), tmp_path / "kept.jsonl"
    code = main(["data", str(kept), f"--data={path}"])
    if form.refused:
        assert code == 2 and form.refused in capsys.readouterr().err
    else:
        assert (code, len(kept.read_text().splitlines())) == (0, len(form.rows))


@pytest.mark.parametrize("name", OF_FILES)
def test_fits_learn_the_tokens_that_their_marks_leave(name: str, tmp_path: Path) -> None:
    (form, _), path = OF_FILES[name], written(tmp_path, name)
    with pytest.raises(ValueError, match=form.dpo):
        read(path, "dpo")
    if form.refused:
        with pytest.raises(ValueError, match=form.refused):
            read(path)
        return
    samples, left_out = read(path)
    assert (len(samples), left_out) == (len(form.rows), {})
    tokenizer = byte_tokenizer(CHATML)
    tokeniser = Tokeniser(tokenizer, model=ModelConfig())
    for sample, text in zip(samples, form.learned, strict=True):
        (side,) = sample.sides
        (branch,) = tokeniser.branches(side.messages, learn_from=side.learn_from, unlearnt=side.unlearnt)
        marked = [token for token, is_learnt in zip(branch.tokens, branch.loss_mask, strict=True) if is_learnt]
        assert tokenizer.decode(marked) == text


@pytest.mark.parametrize("name", PLAYED)
async def test_their_tasks_are_scored(name: str, tmp_path: Path) -> None:
    (form, _), path = OF_FILES[name], str(written(tmp_path, name))
    env = make_env(form.env, {"train": path, "held_out": path} | form.options)
    for index, action, score in form.plays:
        seen = await env.reset(Task(env=form.env, split="train", index=index))
        while not seen.terminated:
            seen = await env.step(action)
        assert (index, action, seen.score) == (index, action, score)
