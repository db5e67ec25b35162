"""`slipstream collect --expert`: rows of an environment's expert, and recorded rows that it finishes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import action_format
from slipstream.common.text.transcript import Transcriber
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Observation
from slipstream.tools.cli.cli import main
from slipstream.tools.play.retrace import Retraced, retrace
from slipstream.tools.replay.trajectory_rows import row_of
from slipstream.tools.run import prepare
from slipstream.tools.run.check_input import check_collect
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.prepare import NoisyExpert, expert_episodes, vocabulary_texts
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.tools.cli.test_cli import own_environment  # noqa: F401 - what `main` changes in this process is undone

TOKENIZER = shop_tokenizer()
Row = dict[str, Any]


def settings(*overrides: str) -> Config:
    return load_config(None, ["env.name=shop", "env.max_turns=10", "model.max_tokens=400", *overrides])


def recorded(folder: Path, *, noise: float, number: int = 30) -> Path:
    """Rows of an expert that sometimes errs."""
    config, transcriber = settings(), Transcriber(TOKENIZER)
    tasks = {index: Task(env="shop", split="train", index=index) for index in range(number)}
    plain = action_format("plain")
    episodes = expert_episodes(
        config, TOKENIZER, tasks, sampler=lambda env, _: NoisyExpert(env, TOKENIZER, plain, noise)
    )
    rows = [row_of(trajectory, transcriber, state="collected", step=None) for trajectory in episodes]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def retraced(path: Path, *, mistake: bool) -> Retraced:
    options = CollectOptions(expert=True, retrace=str(path), mistake=mistake)
    check_collect(settings(), options)
    return retrace(settings(), options, TOKENIZER)


def replies(row: Row) -> list[Row]:
    return [message for message in row["messages"] if message["role"] == "assistant"]


async def observations(row: Row) -> list[str]:
    env = make_env("shop", {})
    label, split, index = row["task"].split("/")
    seen = [await env.reset(Task(env=label, split=split, index=int(index)))]
    for reply in replies(row):
        seen.append(await env.step(reply["content"]))
    await env.close()
    texts = [message.content for observation in seen[:-1] for message in observation.messages]
    return [TOKENIZER.decode(TOKENIZER.encode(text)) for text in texts]


@pytest.mark.parametrize("mistake", [False, True])
def test_every_observation_of_a_retraced_episode_is_what_the_environment_answers(mistake: bool, tmp_path: Path) -> None:
    path = recorded(tmp_path, noise=0.3)
    before = {row["task"]: row for row in map(json.loads, path.read_text().splitlines())}
    done = retraced(path, mistake=mistake)
    assert len(done.rows) + done.left_out.total() == 30 and len(done.rows) > 15
    for row in done.rows:
        others = [message["content"] for message in row["messages"] if message["role"] != "assistant"]
        assert others == asyncio.run(observations(row))
        spared = [message for message in replies(row) if message.get("loss") is False]
        assert replies(row)[: len(spared)] == spared and len(spared) < len(replies(row))
        kept = len(spared) - mistake
        old = [message["content"] for message in replies(before[row["task"]])]
        assert [message["content"] for message in spared[:kept]] == old[:kept]
        if mistake:
            assert spared[-1]["content"] != old[kept]
    assert len({len([m for m in replies(row) if "loss" in m]) for row in done.rows}) > 2  # cut at different turns
    assert sum(row["success"] for row in done.rows) > 0.8 * len(done.rows)


class WithExample:
    """An environment whose opening has an example: a request and an answer."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def reset(self, task: Task) -> Observation:
        opening = await self._env.reset(task)
        example = (Message("user", "find red hat"), Message("assistant", "search [ red hat ]"))
        return replace(opening, messages=(*example, *opening.messages))


def test_an_example_in_the_opening_is_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "make_env", lambda *given: WithExample(make_env(*given)))
    path = recorded(tmp_path, noise=0.0, number=12)
    before = {row["task"]: replies(row) for row in map(json.loads, path.read_text().splitlines())}
    done = retraced(path, mistake=True)
    assert len(done.rows) > 6
    for row in done.rows:
        example, *turns = replies(row)
        spared = [turn for turn in turns if turn.get("loss") is False]
        assert example["content"] == "search [ red hat ]" and example["loss"] is False
        assert turns[: len(spared)] == spared and len(spared) < len(turns)
        recorded_there = before[row["task"]][len(spared)]["content"]  # after the example
        assert spared[-1]["content"] != recorded_there, "the mistake is not learned from"


def test_the_same_seed_retraces_alike_and_what_cannot_be_is_counted(tmp_path: Path) -> None:
    path = recorded(tmp_path, noise=0.0, number=3)
    assert retraced(path, mistake=True).rows[0]["messages"] == retraced(path, mistake=True).rows[0]["messages"]
    row = json.loads(path.read_text().splitlines()[0])
    tasks = ("shop/held_out/1", "maze/train/1", f"shop/train/{'9' * 5000}")
    rows = [*(row | {"task": task} for task in tasks), row | {"messages": None}, {}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + "no JSON\n")
    done = retraced(path, mistake=False)
    assert done.rows == []
    assert done.left_out == {"not of a train task of this environment": 3, "cannot be read": 3}


def test_rows_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="`--retrace` must name a file of rows"):
        check_collect(settings(), CollectOptions(expert=True, retrace="nowhere.jsonl"))


def test_the_expert_plays_without_an_engine_and_finishes_what_it_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    tiny = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    texts = vocabulary_texts(config.env, 20)
    make_tiny_model(tmp_path / "model", texts=texts, shape=tiny, max_tokens=400, seed=0)
    rows, finished = tmp_path / "rows.jsonl", tmp_path / "finished.jsonl"
    shared = [f"model.path={tmp_path}/model", "env.name=shop", "env.max_turns=10", "model.max_tokens=400", "--expert"]
    assert main(["collect", str(rows), *shared, "--num-tasks=6"]) == 0
    assert f"{rows}: 6 trajectories of 6 tasks, 6 successes in 6 of the tasks, by the expert" in capsys.readouterr().out
    assert main(["collect", str(finished), *shared, f"--retrace={rows}", "--mistake"]) == 0
    assert "finished by the expert" in capsys.readouterr().out
    assert all("loss" in replies(row)[0] for row in map(json.loads, finished.read_text().splitlines()))
    assert main(["collect", str(tmp_path / "x.parquet"), *shared, f"--retrace={rows}"]) == 2
    assert "must end in .jsonl" in capsys.readouterr().err
    # A part of the reward that is the score is that of the expert's episodes too.
    shared.append("env.rewards.done={part: 'tests.envhub.rewards.others:gives_later', success_from: 1}")
    for more in ((), (f"--retrace={rows}",)):
        assert main(["collect", str(finished), *shared, "--num-tasks=6", "--force", *more]) == 0
        assert ", 0 successes" in capsys.readouterr().out
