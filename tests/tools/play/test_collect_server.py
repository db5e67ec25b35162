"""`slipstream collect --server`: a chat server plays, its reasoning is kept, and nothing is played twice."""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import encode
from slipstream.common.records.frame_file import read_frames, write_frames
from slipstream.common.records.trajectory import decode_trajectory
from slipstream.tools.play.collect import collect
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.evaluate import evaluate
from slipstream.tools.run.collect_options import CollectOptions
from tests.actors.scripted_judge import Reply, ScriptedJudge
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.processes import CLI, python
from tests.tools.run.tiny_model import save_tiny_model
from tests.waiting import wait_until

ENV = ("env.name=grid", "env.options={game: maze, profile: small, size: 5}", "env.max_turns=3")


def message(content: str | None, finish_reason: str = "stop", **more: object) -> Reply:
    body = {"choices": [{"message": {"content": content, **more}, "finish_reason": finish_reason}], "usage": {}}
    return 200, {}, json.dumps(body).encode()


def walk(request: dict[str, Any], number: int) -> Reply:
    return message("go north", reasoning_content=f"request {number}: north is free")


def walk_from_the_second_on(request: dict[str, Any], number: int) -> Reply:
    return walk(request, number) if number else (400, {}, b"no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.save_pretrained(folder)
    return save_tiny_model(folder, vocab_size=len(tokenizer), max_position_embeddings=4096)


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    with ScriptedJudge(walk) as judge:
        yield judge


def settings(model: Path) -> list[str]:
    sizes = ["model.max_tokens=2048", "sampling.max_turn_tokens=400", "replay.group_size=2"]
    return [*ENV, *sizes, f"model.path={model}", "run.name=served"]


def file_of(folder: Path, url: str, **more: object) -> str:
    path = folder / "server.yaml"
    path.write_text(json.dumps({"url": url, "model": "thinker", "deadline_s": 20, **more}))
    return str(path)


def collected(
    folder: Path, server: ScriptedJudge, learner: Path, *overrides: str, held_out: bool = False, **more: object
) -> list[dict[str, Any]]:
    config = load_config(None, [*settings(learner), *overrides])
    options = CollectOptions(num_tasks=3, held_out=held_out, server=file_of(folder, server.url, **more))
    assert collect(config, path=folder / "rows.jsonl", force=False, options=options) == 0
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_each_row_has_its_thoughts_and_the_server_gets_none(tmp_path: Path, server: ScriptedJudge, model: Path) -> None:
    def together(request: dict[str, Any], number: int) -> Reply:
        wait_until(lambda: server.most_open >= 2, "two requests at a time")
        return walk(request, number)

    server.answer_by(together)
    rows = collected(tmp_path, server, model, "env.action_format=plain", max_concurrent=4)
    assert [(row["group_id"], row["member"]) for row in rows] == list(itertools.product(range(3), (0, 1)))
    assert server.most_open > 1
    for row in rows:
        said = [each["content"] for each in row["messages"] if each["role"] == "assistant"]
        assert len(said) == row["num_turns"] >= 1
        assert all(each.startswith("<think>\nrequest ") and each.endswith("</think>\n\ngo north") for each in said)
    later = max(server.requests, key=lambda request: len(request["messages"]))
    assert later["model"] == "thinker" and later["temperature"] == 1.0
    assert [each["role"] for each in later["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [each["content"] for each in later["messages"] if each["role"] == "assistant"] == ["go north", "go north"]
    assert later["messages"][0] in [row["messages"][0] for row in rows]
    assert not (tmp_path / "rows.jsonl.journal").exists()


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (message(None), "the reply has no content"),
        (message("x" * 500), "an answer of 501 tokens, with 400 left; raise sampling.max_turn_tokens"),
        (message("go north<|im_end|>and on"), "the answer has the text of a mark that ends a turn"),
        ((400, {}, b"no such model"), "refused with status 400"),
        (message("go", finish_reason="length"), "cut off at `max_tokens` of `request`"),
        ((200, {}, b'{"choices": [{"message": {"content": 5}}]}'), "the reply is not a chat completion"),
    ],
)
def test_an_answer_that_cannot_be_learned_from_is_no_row_and_can_be_tried_again(
    tmp_path: Path, server: ScriptedJudge, model: Path, reply: Reply, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer_by(lambda request, number: reply)
    with pytest.raises(ConfigError, match="every episode failed"):
        collected(tmp_path, server, model)
    assert complaint in caplog.text
    server.answer_by(walk)
    assert len(collected(tmp_path, server, model)) == 6


def test_a_journal_of_other_servers_or_settings_is_refused(tmp_path: Path, server: ScriptedJudge, model: Path) -> None:
    server.answer_by(lambda request, number: (400, {}, b"no"))
    with pytest.raises(ConfigError, match="every episode failed"):
        collected(tmp_path, server, model)
    cases = ((), {"model": "another"}), ((), {"request": {"temperature": 0}}), (("env.max_turns=4",), {})
    for overrides, changes in cases:
        with pytest.raises(ConfigError, match="begun with another server or other settings; repeat that command"):
            collected(tmp_path, server, model, *overrides, **changes)


def test_a_journal_of_more_or_other_episodes_than_asked_for_is_refused_and_one_of_fewer_continues(
    tmp_path: Path, server: ScriptedJudge, model: Path
) -> None:
    server.answer_by(walk_from_the_second_on)
    assert len(collected(tmp_path, server, model, "replay.group_size=3")) == 8
    (tmp_path / "rows.jsonl").unlink()
    for group_size, held_out in ((2, False), (4, True)):
        with pytest.raises(ConfigError, match="has episodes of other tasks, or more of each; repeat that command"):
            collected(tmp_path, server, model, f"replay.group_size={group_size}", held_out=held_out)
    assert len(collected(tmp_path, server, model, "replay.group_size=4")) == 12


def test_an_inconsistent_journaled_episode_is_played_again(tmp_path: Path, server: ScriptedJudge, model: Path) -> None:
    server.answer_by(walk_from_the_second_on)
    assert len(collected(tmp_path, server, model)) == 5
    (tmp_path / "rows.jsonl").unlink()
    journal = tmp_path / "rows.jsonl.journal"
    identity, first, *others = read_frames(journal)
    episode = decode_trajectory(first, max_bytes=len(first) << 8, vocab_size=1 << 20)
    damaged = encode(msgspec.structs.replace(episode, loss_mask=b""), compress=True)
    with journal.open("wb") as file:
        write_frames(file, [identity, *others, damaged])
    assert len(collected(tmp_path, server, model)) == 6


def test_a_file_that_is_not_a_journal_is_left_as_it_is(tmp_path: Path, server: ScriptedJudge, model: Path) -> None:
    other = tmp_path / "rows.jsonl.journal"
    other.write_text("notes of a person, longer than the head of a journal\n")
    with pytest.raises(ConfigError, match="is not a journal of `slipstream collect`; name another FILE"):
        collected(tmp_path, server, model)
    assert other.read_text().startswith("notes of a person") and not server.requests


def test_after_kill_9_only_what_had_not_ended_is_played(tmp_path: Path, server: ScriptedJudge, model: Path) -> None:
    def slow(request: dict[str, Any], number: int) -> Reply:
        time.sleep(0.05)
        return walk(request, number)

    server.answer_by(slow)
    rows, journal = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.journal"
    options = [f"--server={file_of(tmp_path, server.url, max_concurrent=2)}", "--num-tasks=8"]
    command = [*CLI, "collect", str(rows), *settings(model), *options]
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE)
    wait_until(lambda: len(server.requests) >= 20 or process.poll() is not None, "some requests", timeout_s=300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert journal.stat().st_size > 1000 and not rows.exists()
    with journal.open("r+b") as file:  # as if it had been killed while it wrote
        file.truncate(journal.stat().st_size - 3)
    asked = len(server.requests)
    done = python(*command, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert "ends within an episode, which is played again" in done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len({(row["group_id"], row["member"]) for row in found}) == len(found) == 16
    assert len(server.requests) - asked < sum(row["num_turns"] for row in found)


NAMED = "{url: 'http://127.0.0.1:1/v1', model: m"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("url: [", "cannot be read"),
        ("model: m", "must have url and model"),
        ("{url: 'http://127.0.0.1:1/v1'}", "a name"),
        ("{url: actors, model: m}", "must be a server's"),
        (f"{NAMED}, colour: red}}", "unexpected keyword argument 'colour'"),
        (f"{NAMED}, request: {{messages: []}}}}", "without model and messages"),
        *(
            (f"{NAMED}, request: {{{wrong}}}}}", "request` must have values of JSON, got")
            for wrong in ("temperature: .nan", "since: 2026-01-02", "5: 1, stop: x")
        ),
        (f"{NAMED}, key_env: NO_SUCH_KEY}}", "NO_SUCH_KEY, which is not set"),
    ],
)
def test_a_file_that_names_no_server_is_refused(tmp_path: Path, model: Path, text: str, complaint: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    config = load_config(None, settings(model))
    with pytest.raises(ConfigError, match=complaint):
        collect(config, path=tmp_path / "rows.jsonl", force=False, options=CollectOptions(server=str(path)))


def test_a_server_is_measured_on_the_held_out_tasks(
    tmp_path: Path, server: ScriptedJudge, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, [*settings(model), "eval.num_tasks=4"])
    options = EvalOptions(server=file_of(tmp_path, server.url), attempts=2)
    assert evaluate(config, options=options) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["sampling"], line["model"]) == ("server", "thinker")
    assert (line["num_tasks"], line["num_episodes"], set(line["pass_at"])) == (4, 8, {"1", "2"})
    assert list(line["best_of"]) == ["majority"]  # a server sends no likelihood
    assert line["tokens_written"] > 0 and line["success_low"] <= line["success"] <= line["success_high"]
    server.answer_by(lambda request, number: (400, {}, b"no such model"))
    with pytest.raises(ConfigError, match="every episode failed; see the warnings above"):
        evaluate(config, options=options)


def test_a_server_earns_the_part_that_is_the_score_and_no_other(
    tmp_path: Path, server: ScriptedJudge, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = "env.rewards.done={part: 'tests.envhub.rewards.others:made', success_from: 1}"
    score = [done, "env.rewards.long={part: length, budget_tokens: 1}"]
    rows = collected(tmp_path, server, model, *score)
    assert all(row["success"] and row["score"] == 1 for row in rows)
    assert {each["name"] for row in rows for each in row["rewards"]} - {"done"} == {"solved"}
    config = load_config(None, [*settings(model), "eval.num_tasks=2", *score])
    capsys.readouterr()
    assert evaluate(config, options=EvalOptions(server=file_of(tmp_path, server.url))) == 0
    assert json.loads(capsys.readouterr().out)["success"] == 1
    rubric = {"text": "Mark it.", "scale": [0, 10], "criteria": {"clear": "It is clear."}}
    config.env.rewards = {"nice": {"part": "judge", "url": "actors", "rubric": rubric, "success_from": 1}}
    with pytest.raises(ConfigError, match=r"`env\.rewards\.nice`: no engine runs here"):
        evaluate(config, options=EvalOptions(server=file_of(tmp_path, server.url)))


def test_a_format_to_compare_that_a_server_cannot_be_asked_for_is_refused_before_anything_is_played(
    tmp_path: Path, server: ScriptedJudge, model: Path
) -> None:
    options = EvalOptions(server=file_of(tmp_path, server.url), compare=("plain", "tools"))
    with pytest.raises(ConfigError, match=r"`--server` needs another env\.action_format than tools"):
        evaluate(load_config(None, settings(model)), options=options)
    assert server.requests == []


@pytest.mark.parametrize("overrides", ["model.context=window", "env.action_format=tools model.tool_parser=hermes"])
def test_what_a_server_cannot_be_asked_is_refused(tmp_path: Path, model: Path, overrides: str) -> None:
    config = load_config(None, [*settings(model), "warm_start.episodes=0", *overrides.split()])
    complaint = r"`--server` needs another env\.action_format than tools, and model\.context"
    with pytest.raises(ConfigError, match=complaint):
        collect(config, path=tmp_path / "rows.jsonl", force=False, options=CollectOptions(server="server.yaml"))
