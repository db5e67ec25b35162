"""The environment `dataset`: rows of files, functions of the user's, and the errors for garbage."""

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task, Trajectory
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.dataset.checks import CHECKS
from slipstream.envhub.rewards.part import parts_of
from slipstream.replay.server.server_settings import free_port
from slipstream.tools.run.check_input import check_env
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, ids, rollout_of
from tests.adapters.held import ALWAYS, acted
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.envhub import test_env_contract as contract
from tests.envhub.dataset.rows import write_rows
from tests.envhub.env_cases import Case
from tests.envhub.rewards.own import OWN, Own, own

REPOSITORY = Path(__file__).parents[3]
SUMS = [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a in range(2, 9) for b in range(2, 9)]
__all__ = ["own"]  # a fixture
CHECKS_OF_CONTRACT = [*ALWAYS, contract.test_step_after_the_end_is_an_error]


def on_rows(folder: Path, rows: list[Any], **options: Any) -> dict[str, Any]:
    """The options of an environment that has these rows in both splits."""
    path = write_rows(folder / "rows.jsonl", rows)
    return {"train": path, "held_out": path, **options}


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return write_rows(tmp_path / "sums.jsonl", SUMS)


def expert_of(options: dict[str, Any]) -> str:
    env = make_env("dataset", options)
    asyncio.run(env.reset(Task(env="dataset", split="train", index=0)))
    return env.expert()


def episode_on(options: dict[str, Any], reply: str, *, rewards: dict[str, Any]) -> Trajectory:
    """The episode of one reply to the first training task, as an actor would store it."""
    tokenizer = merging_tokenizer(CHATML)
    record = EpisodeRecord(attempt=dataclasses.replace(attempt_on(), task=Task(env="dataset", split="train", index=0)))
    parts, limits = {"dataset": parts_of("env.rewards", rewards)}, dataclasses.replace(ALLOWANCE, max_turns=1)
    scoring = Scoring(parts=parts, tokenizer=tokenizer, allowance=limits)

    async def play() -> Trajectory:
        engine = engine_of(lambda tokens, seed: [*ids(tokenizer, reply), tokenizer.eos_token_id], max_tokens=4096)
        allowance = dataclasses.replace(ALLOWANCE, max_tokens=4096)
        env = make_env("dataset", options)
        trajectory = await rollout_of(env, engine, record=record, tokenizer=tokenizer, allowance=allowance)
        return await rewarded(trajectory, record, scoring=scoring)

    return asyncio.run(play())


@pytest.mark.parametrize("check", CHECKS_OF_CONTRACT, ids=lambda check: check.__name__)
def test_a_data_set_keeps_the_contract(check: Callable[[Case], None], sums: str) -> None:
    options = {"train": sums, "check": "number"}
    check(Case(name="dataset", max_turns=5, noisy_success=0, options=options, is_spaced=False, share=0.05))


def test_one_prompt_in_eight_is_held_out_and_no_prompt_is_in_both(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {number % 100}", "answer": "yes"} for number in range(200)]  # each twice
    env = make_env("dataset", {"train": write_rows(tmp_path / "rows.jsonl", rows)})

    async def texts(split: str) -> set[str]:
        tasks = (Task(env="dataset", split=split, index=index) for index in range(200))
        return {(await env.reset(task)).messages[0].content for task in tasks}

    train, held_out = asyncio.run(texts("train")), asyncio.run(texts("held_out"))
    assert len(train | held_out) == 100 and not train & held_out
    assert 5 <= len(held_out) <= 20


def test_a_held_out_file_of_its_own_is_not_split(sums: str, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held.jsonl", [{"prompt": "What is 1 + 1?", "answer": 2}])
    env = make_env("dataset", {"train": sums, "held_out": held_out})
    opening = asyncio.run(env.reset(Task(env="dataset", split="held_out", index=7)))
    assert opening.messages[0].content == "What is 1 + 1?"
    train = [asyncio.run(env.reset(Task(env="dataset", split="train", index=index))) for index in range(len(SUMS))]
    assert {opening.messages[0].content for opening in train} == {row["prompt"] for row in SUMS}


def test_parquet_with_chat_prompts_and_nested_columns_is_read(tmp_path: Path) -> None:
    """The form of verl's files."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": "5", "style": "rule"}}]
    path = write_rows(tmp_path / "rows.parquet", rows)
    options = {"train": path, "held_out": path, "answer": "reward_model.ground_truth", "system": "Add."}
    options["answer_pattern"] = r"<answer>(.*?)</answer>"
    opening, end = acted("dataset", options, 0, ["<answer>4</answer> no: <answer> 5 </answer>"])
    said = [("system", "Add."), ("system", "Be brief."), ("user", "2 + 3?")]
    assert [(message.role, message.content) for message in opening.messages] == said
    assert end.success
    assert not acted("dataset", options, 0, ["5"])[1].success, "only what the pattern finds is compared"


def test_the_expert_gives_the_answer_or_the_solution(tmp_path: Path) -> None:
    options = on_rows(tmp_path, [{"prompt": "2 + 3?", "answer": [5, "five"], "worked": "2 + 3 = #5#"}])
    assert expert_of(options) == "5"
    options["answer_pattern"] = "#(.*)#"
    assert expert_of({**options, "solution": "worked"}) == "2 + 3 = #5#"
    with pytest.raises(NotImplementedError, match=r"name a column with whole replies by `env.options.solution`"):
        expert_of(options)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_reward_function_of_trl_is_taken_as_it_is(own: Own, tmp_path: Path, is_chat: bool) -> None:
    """It gets what TRL passes: lists, columns by name, and a chat where the prompt is one."""
    seen: list[dict[str, Any]] = []

    def near(prompts: list[Any], completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, "answer": answer, **kwargs})
        return [0.5]

    own.near = near
    prompt = [{"role": "user", "content": "2 + 3?"}] if is_chat else "2 + 3?"
    rows = [{"prompt": prompt, "answer": 5, "kind": "sum"}]
    options = on_rows(tmp_path, rows, check="number", system="Add.")
    tokenizer = merging_tokenizer(CHATML)
    end = episode_on(options, "5", rewards={"near": {"part": f"{OWN}:near", "weight": -0.2}})
    assert end.turns[-1].rewards == {"right": 1.0, "near": -0.1}
    assert (end.score, end.success, end.part_values) == (1.0, True, {"near": 0.5})
    (given,) = seen
    assert given.pop("completion_ids") == [[*ids(tokenizer, "5"), tokenizer.eos_token_id]]
    said = [{"role": "assistant", "content": "5"}] if is_chat else "5"
    assert given == {"prompts": [prompt], "completions": [said], "answer": [5], "prompt": [prompt], "kind": ["sum"]}


def test_a_data_set_without_answers_has_the_score_of_a_part(own: Own, tmp_path: Path) -> None:
    own.length = lambda completions: [len(completions[0]) / 4]
    options = on_rows(tmp_path, [{"question": "Say something."}], prompt="question", check="none")
    rewards = {"long": {"part": f"{OWN}:length", "success_from": 1}}
    end = episode_on(options, "four", rewards=rewards)
    assert (end.turns[-1].rewards, end.score, end.success) == ({"unchecked": 0.0, "long": 1.0}, 1.0, True)
    end = episode_on(options, "x", rewards={"long": {"part": f"{OWN}:length"}})
    assert (end.score, end.success) == (0.0, False)


def test_a_function_or_a_judge_that_needs_a_missing_column_is_refused_before_the_run(own: Own, sums: str) -> None:
    own.needs_more = lambda completions, trainer_state: [0.0]
    config = load_config(None, ["env.name=dataset", f"env.options.train={sums}", "env.options.check=number"])
    check_env(config.env)
    config.env.rewards = {"ids": {"part": f"{OWN}:needs_more"}}
    with pytest.raises(ConfigError) as error:
        check_env(config.env)
    assert "`env.rewards.ids`" in str(error.value) and "argument: 'trainer_state'" in str(error.value)
    assert "columns of the task (prompt, answer, prompts)" in str(error.value)
    own.needs_more = lambda completions, answer: [0.0]
    check_env(config.env)
    rubric = {"text": "Mark.", "scale": [0, 1], "criteria": {"right": "It is right."}}
    judge = {"part": "judge", "url": "http://127.0.0.1:1/v1", "model": "m", "rubric": rubric}
    for kind in (judge, judge | {"compare": "listwise"}):
        config.env.rewards = {"clear": kind | {"columns": ["answer"]}}
        check_env(config.env)
        config.env.rewards = {"clear": kind | {"columns": ["answer", "anwser"]}}
        with pytest.raises(ConfigError, match=r"`env\.rewards\.clear`: a judge is shown the columns anwser, and"):
            check_env(config.env)


def test_the_files_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dataset.md").read_text()
    blocks = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    for name, block in zip(("sums.jsonl", "sums.yaml", "my_rewards.py"), blocks[:3], strict=True):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (part,) = load_config("sums.yaml", ["env.options.held_out=sums.jsonl"]).env.entries().values()
    assert part.name == "dataset"
    end = episode_on(part.options, "It is 42.", rewards=part.rewards)
    assert end.turns[-1].rewards == {"right": 1.0, "short": 0.1}


def test_the_example_with_a_function_and_a_judge_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples, port = REPOSITORY / "docs" / "examples", free_port()
    for name in ("words.yaml", "words_judge.py"):
        (tmp_path / name).write_text((examples / name).read_text().replace("8765", str(port)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY)
    subprocess.run([sys.executable, examples / "words.py"], check=True, timeout=60)
    config = load_config(str(REPOSITORY / "conf" / "quickstart.yaml"), [], presets=["words.yaml"])
    (entry,) = config.env.entries().values()
    first = json.loads((tmp_path / "words.jsonl").read_text().splitlines()[0])
    rows = {**entry.options, "held_out": "words.jsonl", "train": write_rows(tmp_path / "one.jsonl", [first])}
    server = subprocess.Popen([sys.executable, "words_judge.py"])
    try:
        end = episode_on(rows, first["answer"], rewards=entry.rewards)
    finally:
        server.terminate()
        server.wait()
    assert end.turns[-1].rewards == {"right": 1.0, "named": 0.5, "brief": pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "row 2: column 'answer' must contain an answer, got None"),
        ({"prompt": "x", "answer": 2, "n": {"id": 2**64}}, "row 2: a whole number is beyond 64 bits; write it as text"),
        ({"prompt": [{"role": "assistant", "content": "It is"}], "answer": 2}, "ends with the assistant's message"),
        ({"prompt": "x", "answer": "two"}, "row 2: the answer 'two' contains no number"),
        ({"prompt": "", "answer": 2}, "row 2: `prompt` must be a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": 2}, "row 2: a message in `prompt` must have a role"),
        ([], "line 2 must be a JSON object, got a list"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [SUMS[0], row])
    with pytest.raises(ValueError, match=r"rows\.jsonl") as error:
        make_env("dataset", {"train": path, "check": "number"})
    assert message in str(error.value)


def test_what_is_no_data_set_of_a_file_or_a_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, named, torn = tmp_path / "empty.jsonl", tmp_path / "rows.csv", tmp_path / "torn.parquet"
    for path in (empty, named):
        path.write_text("")
    torn.write_bytes(b"PAR1 and nothing else PAR1")
    for path, message in (
        (empty, "has no rows"),
        (named, r"must end in \.jsonl, \.json or \.parquet"),
        (torn, "cannot be read after row 0"),
        (tmp_path / "gone.jsonl", "does not exist; give the path of a .jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            make_env("dataset", {"train": str(path)})
    with pytest.raises(ValueError, match=r"none is in the split held_out.*set `env\.options\.held_out`"):
        make_env("dataset", {"train": write_rows(tmp_path / "one.jsonl", SUMS[:1])})
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"needs the package datasets.*run `pip install datasets`"):
        make_env("dataset", {"train": "hub:openai/gsm8k:main:train"})
    for name in ("hub:openai/gsm8k", "hub::train", "hub:a:b:c:train", "hub:a:"):
        with pytest.raises(ValueError, match=r"must be hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT, as in"):
            make_env("dataset", {"train": name})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check": "exakt"}, f"must be {' or '.join([*CHECKS, 'none'])}"),
        ({"answer_pattern": "("}, "is not a regular expression"),
        ({"answer_pattern": "a"}, "must have one group, around the answer, has 0"),
        ({"colums": "a"}, "its options are: train, held_out, prompt, answer"),
        ({"prompt": "q", "conversation": "m"}, "`env.options.prompt` 'q' has no effect with conversation"),
        ({"check": "none", "answer_pattern": "x"}, "answer_pattern` 'x' has no effect with check=none; leave it out"),
    ],
)
def test_a_wrong_option_is_named(sums: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_env("dataset", {"train": sums, **options})
