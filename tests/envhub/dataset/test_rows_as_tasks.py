"""The rows of a file as tasks: how many there are, that each is visited, and that each can be played."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.group.group import FIRST_PAUSE_S, FREE_FAILURES, MAX_PAUSE_S, Episodes
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_any_env, make_env, num_held_out, num_train_tasks
from slipstream.learner.supply.curriculum import Curriculum
from slipstream.tools.play.collect import tasks_to_play
from slipstream.tools.run.check_input import check_collect
from slipstream.tools.run.collect_options import CollectOptions
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.envhub.dataset.rows import write_rows

NUM_ROWS = 200
ROWS = [{"prompt": f"What is {n} + 1?", "answer": n + 1, "hint": {"of": n}} for n in range(NUM_ROWS)]


def config_of(name: str, path: str, *settings: str) -> Config:
    options = [f"env.options.train={path}", "warm_start.episodes=0", *settings]
    if name == "agent":
        options.append("env.options.agent=tests.envhub.agents:chats")
    return load_config(None, [f"env.name={name}", *options])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ["dataset", "agent"])
def test_all_rows_are_visited_once_before_any_twice_and_evaluated_once(name: str, suffix: str, tmp_path: Path) -> None:
    config = config_of(name, write_rows(tmp_path / f"rows{suffix}", ROWS), "eval.num_tasks=100")
    num_trained = num_train_tasks(config.env)[name]
    curriculum = Curriculum(config.env, seed=3)
    for lap in range(2):
        tasks = [curriculum.choose(lap * num_trained + group).index for group in range(num_trained)]
        assert sorted(tasks) == list(range(num_trained))
    assert num_trained + num_held_out(config) == NUM_ROWS and 10 < num_held_out(config) < 50
    config.eval.num_tasks, config.env.num_train_tasks = None, 7
    assert (num_held_out(config), num_train_tasks(config.env)) == (min(32, NUM_ROWS - num_trained), {name: 7})
    check_collect(config, CollectOptions(num_tasks=7))
    with pytest.raises(ConfigError, match=r"must be <= env.num_train_tasks = 7, got 8"):
        check_collect(config, CollectOptions(num_tasks=8))
    usual = CollectOptions()
    check_collect(config, usual)
    assert list(tasks_to_play(usual, config)) == list(range(7))
    assert list(tasks_to_play(CollectOptions(first_task=5), config)) == [5, 6]
    assert len(tasks_to_play(usual, load_config(None, []))) == 100
    assert num_train_tasks(load_config(None, []).env) == {"shop": 100_000}


def test_a_file_of_a_mixture_with_fewer_rows_than_tasks_are_collected_is_played_once(tmp_path: Path) -> None:
    few = f"few: {{name: dataset, options: {{train: {write_rows(tmp_path / 'rows.jsonl', ROWS[:9])}}}}}"
    config = load_config(None, [f"env.mixture={{{few}, many: {{name: shop}}}}"])
    num_few = num_train_tasks(config.env)["few"]
    for first in (0, 5):
        tasks = tasks_to_play(CollectOptions(num_tasks=20, first_task=first), config).values()
        assert sorted(task.index for task in tasks if task.env == "few") == list(range(num_few))
        assert [task.index for task in tasks if task.env == "many"] == list(range(first, first + 20))


@pytest.mark.parametrize("name", ["dataset", "agent"])
def test_files_that_share_tasks_are_named_with_it(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write_rows(tmp_path / "train.jsonl", ROWS)
    other = write_rows(tmp_path / "other.jsonl", [*ROWS[190:], {"prompt": "x", "answer": 1}])
    env = config_of(name, train, f"env.options.held_out={other}").env
    make_any_env(name, env.options)
    said = [record.getMessage() for record in caplog.records if "also train tasks" in record.getMessage()]
    assert said == [f"{other}: 10 of 11 tasks are also train tasks; remove them from one"]


def test_a_column_that_only_other_rows_have_is_none_in_either_format_and_a_field_is_not_there(tmp_path: Path) -> None:
    """So a reward function, an agent and a judge get the column in each episode."""
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": 1, "why": "b", "state": {"door": 1}},
        {"prompt": "c", "answer": 2, "tools": "[]", "state": {"lamp": 0.5, "door": 2}},
    ]
    whole = [{"why": None, "tools": None, **row} for row in rows]
    for suffix in (".jsonl", ".parquet"):
        path = write_rows(tmp_path / f"rows{suffix}", rows if suffix == ".jsonl" else whole)
        of_agent = make_any_env("agent", {"agent": "tests.envhub.agents:chats", "train": path, "held_out": path})
        of_rows = make_env("dataset", {"train": path, "held_out": path, "tools": "tools"})
        for index, wanted in enumerate(whole):
            task = Task(env="dataset", split="train", index=index)
            assert of_agent.columns(task) == wanted  # type: ignore[union-attr]
            assert asyncio.run(of_rows.reset(task)).columns == {**wanted, "prompts": wanted["prompt"]}


def test_prompts_without_room_for_a_reply_are_counted_at_the_start(tmp_path: Path) -> None:
    rows = [*ROWS, *({"prompt": "word " * length, "answer": 1} for length in (300, 400, 500))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = byte_tokenizer(CHATML)
    complaint = r"got 1024: 3 of 203 rows have as many or more, such as task dataset/.* with 15"
    with pytest.raises(ConfigError, match=complaint):
        check_template(config_of("dataset", path, "model.max_tokens=1024"), tokenizer)
    check_template(config_of("dataset", path, "model.max_tokens=2800", "learner.micro_batch_tokens=2800"), tokenizer)


def test_failures_in_a_row_slow_down_and_a_success_ends_that() -> None:
    episodes = Episodes()
    pauses = []
    for episodes.num_failed in range(1, 60):
        pauses.append(episodes.pause_s())
    assert sum(pauses[: FREE_FAILURES - 1]) < FIRST_PAUSE_S and pauses[FREE_FAILURES - 1] == FIRST_PAUSE_S
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PAUSE_S


async def test_a_reply_that_is_marked_is_no_example_and_a_thought_is_no_part_of_an_answer(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no", "weight": 0}]
    more = [{"role": "user", "content": "r"}, {"role": "assistant", "content": "yes", "reasoning": "hm"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": said + more, "answer": "yes"}])
    env = make_env("dataset", {"train": path, "held_out": path, "conversation": "messages"})
    await env.reset(Task(env="dataset", split="train", index=0))
    with pytest.raises(NotImplementedError, match="message 2 after the opening is marked"):
        env.expert()
    assert (await env.step("no")).messages[0].content == "r"
    assert env.expert() == "<think>\nhm\n</think>\n\nyes"
    assert (await env.step("yes")).score == 1.0
