"""`slipstream collect`: episodes of a fixed model as rows, by a scripted engine in real environments."""

import asyncio
import itertools
import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.host.act import make_setup
from slipstream.actors.search.episode_tree import FAILED, INTRODUCTION, REQUEST, Collected, EpisodeTree
from slipstream.actors.search.stretch import play_stretch
from slipstream.actors.search.tree_search import START
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Sampling, StopReason, Task, Trajectory, check
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Observation
from slipstream.learner.batch.examples import Goal
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.cli import main
from slipstream.tools.data.fit_rows import read_samples
from slipstream.tools.data.parquet_rows import SCHEMA
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from slipstream.tools.play.collect import collect_on
from slipstream.tools.run.check_input import check_collect
from slipstream.tools.run.collect_options import SEARCHES, CollectOptions
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.episode.episodes import Script, attempt_on, ids
from tests.common.text.small_tokenizer import CHATML, END, FORGETS_THOUGHTS, byte_tokenizer
from tests.guess import WORDS, GuessEnv
from tests.tools.cli.verbs import Output

TOKENIZER = byte_tokenizer(CHATML)
SHOP = ["env.name=shop", "env.max_turns=8"]
GRID = ["env.name=grid", "env.options.game=maze", "env.options.size=5", "env.max_turns=8"]
TINY = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=1, num_kv_heads=1)
GUESS = ["env.name=tests.guess:GuessEnv", "env.max_turns=5"]
WRONG = {"shop": "click [ buy now ]", "grid": "hm"}  # ends an episode without success; changes nothing


class Varied(ScriptedEngine):
    """The scripted engine with log-probabilities that no two generations share."""

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        completion = await super().generate(tokens, sampling, seed=seed)
        chance = random.Random(seed)
        return replace(completion, logprobs=[-chance.random() for _ in completion.tokens])


class BreaksDown(GuessEnv):
    async def reset(self, task: Task) -> Observation:
        if task.index == 1:
            raise RuntimeError("the database is gone")
        self._breaks = task.index == 2
        return await super().reset(task)

    async def step(self, action: str) -> Observation:
        if self._breaks and self._shares:
            raise RuntimeError("the disk is full")
        return await super().step(action)


def settings(*overrides: str) -> Config:
    sizes = ["model.max_tokens=4096", "sampling.max_turn_tokens=64", "learner.micro_batch_tokens=4096"]
    return load_config(None, [*sizes, "replay.group_size=3", "run.seed=5", *overrides])


def options(**changes: Any) -> CollectOptions:
    return CollectOptions(**({"num_tasks": 4} | changes))


def searching(search: str, *, budget: int) -> dict[str, Any]:
    """The options of a search, with a budget where it has one."""
    return {"search": search} | ({} if search in ("none", "tree_of_thoughts") else {"budget": budget})


def setup_of(
    config: Config, script: Script, folder: Path, *, tokenizer: PreTrainedTokenizerBase = TOKENIZER
) -> EpisodeSetup:
    tokenizer.save_pretrained(saved := folder / "tokenizer")
    engine = Varied(script, policy_version=0, schedule=Schedule(token_time_s=0.0), max_tokens=config.model.max_tokens)
    return make_setup(engine, name="collect", run=config, actors=config.actors, tokenizer=load_tokenizer(saved))


def rows_of(config: Config, script: Script, folder: Path, *, code: int = 0, **chosen: Any) -> list[dict[str, Any]]:
    path = folder / "rows.jsonl"
    assert collect_on(setup_of(config, script, folder), config, options(**chosen), path=path) == code
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said_by_policy(tokens: list[int]) -> list[str]:
    parts = str(TOKENIZER.decode(tokens)).split("<|im_start|>assistant\n")[1:]
    return [part.split(END)[0] for part in parts[:-1]]


def wavering(config: Config, *, right: float, first_task: int = 0) -> Script:
    """With chance `right` the next action that the expert would do, else one that is wrong. By the seed alone."""
    plans = asyncio.run(_plans(config, first_task))

    def write(tokens: list[int], seed: int | None) -> list[int]:
        text = str(TOKENIZER.decode(tokens))
        shown = text.split(f"\n\n{INTRODUCTION}")[0] + END  # without the attempts before
        plan = next(plan for opening, plan in plans.items() if f"\n{opening}{END}" in shown)
        left = iter(plan)
        action = next(left)
        for said in said_by_policy(tokens):
            action = next(left, "hm") if said == action else action
        wanted = random.Random(seed).random() < right
        return ids(TOKENIZER, (action if wanted else WRONG[config.env.name]) + END)

    return write


async def _plans(config: Config, first_task: int) -> dict[str, list[str]]:
    env, plans = make_env(config.env.name, config.env.options), {}
    for index in range(first_task, first_task + options().num_tasks):
        observation = await env.reset(Task(env=config.env.name, split="train", index=index))
        plan = plans[observation.messages[-1].content] = list[str]()
        while not observation.done:
            plan.append(env.expert())
            observation = await env.step(plan[-1])
    return plans


def always_red(tokens: list[int], seed: int | None) -> list[int]:
    return ids(TOKENIZER, "red" + END)


def thinking(tokens: list[int], seed: int | None) -> list[int]:
    return ids(TOKENIZER, f"<think>ab a</think>{random.Random(seed).choice(WORDS)}{END}")


def guessing(tokens: list[int], seed: int | None) -> list[int]:
    return ids(TOKENIZER, random.Random(seed).choice(WORDS) + END)


def test_without_a_search_each_task_has_a_group_of_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(*SHOP)
    rows = rows_of(config, wavering(config, right=0.9, first_task=2), tmp_path, first_task=2)
    assert [(row["group_id"], row["member"]) for row in rows] == list(itertools.product((2, 3, 4, 5), (0, 1, 2)))
    assert [row["task"] for row in rows[::3]] == [f"shop/train/{index}" for index in (2, 3, 4, 5)]
    assert {(row["state"], row["step"], row["fidelity"]) for row in rows} == {("collected", None, "tokens")}
    assert {row["return"] for row in rows if row["success"]} == {1.0}
    num_good = sum(row["success"] for row in rows)
    assert 0 < num_good < 12
    assert f"rows.jsonl: 12 trajectories of 4 tasks, {num_good} successes in " in capsys.readouterr().out


def test_rows_of_held_out_tasks_are_for_comparisons_and_nothing_learns_from_them(tmp_path: Path) -> None:
    rows = rows_of(settings(*GUESS), guessing, tmp_path, held_out=True)
    assert {row["task"].partition("/")[2] for row in rows} == {f"held_out/{index}" for index in range(4)}
    for goal in get_args(Goal):
        with pytest.raises(ConfigError, match=r"row 1: task .*/held_out/0 is held out, and nothing learns from it"):
            read_samples(FitOptions(data=str(tmp_path / "rows.jsonl")), goal=goal)


def test_both_kinds_of_file_have_the_columns_of_an_export(tmp_path: Path) -> None:
    config = settings(*GUESS)
    rows = rows_of(config, guessing, tmp_path)
    assert list(rows[0]) == SCHEMA.names
    assert collect_on(setup_of(config, guessing, tmp_path), config, options(), path=tmp_path / "rows.parquet") == 0
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "rows.parquet", "tokenizer"]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("world", [SHOP, [*GRID, "sampling.top_k=5"]], ids=["shop", "grid, kept sets recorded"])
def test_what_is_collected_are_whole_trajectories_and_the_same_ones_again(
    world: list[str], search: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Trajectory] = []
    monkeypatch.setattr("slipstream.tools.play.collect.row_of", lambda each, *_, **__: kept.append(each) or {})
    config = settings(*world)
    for _ in range(2):
        rows_of(config, wavering(config, right=0.8), tmp_path, **searching(search, budget=40))
        (tmp_path / "rows.jsonl").unlink()
    for trajectory in kept:
        check(trajectory, vocab_size=len(TOKENIZER))
        assert trajectory.stop_reason in (StopReason.DONE, StopReason.MAX_TURNS)
        assert len(trajectory.turns) <= 8
    once, again = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    assert [told(trajectory) for trajectory in once] == [told(trajectory) for trajectory in again]
    places = [(trajectory.group_id, trajectory.member) for trajectory in once]
    assert len(set(places)) == len(places)
    assert {group_id for group_id, _ in places} == {0, 1, 2, 3}


def told(trajectory: Trajectory) -> tuple[object, ...]:
    names = ("group_id", "member", "tokens", "behaviour_logprobs", "total_reward", "stop_reason")
    return tuple(getattr(trajectory, name) for name in names)


def tree_on(config: Config, script: Script, folder: Path, *, index: int = 0) -> tuple[EpisodeTree, Collected]:
    collected = Collected()
    task = Task(env=config.env.name, split="train", index=index)
    setup, room = setup_of(config, script, folder), asyncio.Semaphore(4)
    return EpisodeTree(replace(attempt_on(), task=task), setup=setup, room=room, collected=collected), collected


async def test_children_have_their_parents_tokens_and_log_probabilities_bit_for_bit(tmp_path: Path) -> None:
    config = settings(*GUESS)
    tree, collected = tree_on(config, guessing, tmp_path)
    children = await tree.expand(START, width=20)
    assert sorted(child.actions for child in children) == [(word,) for word in WORDS]
    grandchildren = await tree.expand(children[0], width=20)
    assert {child.actions[0] for child in grandchildren} == {children[0].actions[0]}
    for grandchild in grandchildren[:2]:
        await tree.play_out(grandchild, max_turns=1)
    first, second = collected.trajectories
    shared = 4 * first.turns[1].start
    assert first.member != second.member
    assert first.turns[0] == second.turns[0]  # its times too: it was generated once
    assert first.tokens[:shared] == second.tokens[:shared]
    assert first.behaviour_logprobs[:shared] == second.behaviour_logprobs[:shared]
    assert first.behaviour_logprob_array()[first.turns[0].start] < 0
    assert first.tokens != second.tokens
    assert tree.num_turns == collected.num_turns == 20 + 20 + 2


def test_a_turn_that_failed_is_counted_so_that_a_budget_ends(tmp_path: Path) -> None:
    config = settings("env.name=tests.tools.play.test_collect:BreaksDown")
    tree, _ = tree_on(config, guessing, tmp_path, index=1)
    assert asyncio.run(tree.expand(START, width=3)) == []
    assert tree.num_turns == 3
    tree, collected = tree_on(config, guessing, tmp_path, index=2)
    assert asyncio.run(tree.play_out(START, max_turns=3)) is None  # its second turn fails
    assert (tree.num_turns, collected.num_turns, collected.num_failed) == (2, 2, 1)


def test_two_thoughts_before_one_action_are_one_child(tmp_path: Path) -> None:
    def write(tokens: list[int], seed: int | None) -> list[int]:
        return ids(TOKENIZER, f"{random.Random(seed).random()} <action>red</action>{END}")

    plain, _ = tree_on(settings(*GUESS), write, tmp_path)
    assert len(asyncio.run(plain.expand(START, width=3))) == 3
    tagged, _ = tree_on(settings(*GUESS, "env.action_format=action_tag"), write, tmp_path)
    assert [child.actions for child in asyncio.run(tagged.expand(START, width=3))] == [("red",)]


async def test_a_revision_is_shown_every_action_and_answer_of_the_attempts_before(tmp_path: Path) -> None:
    openings = []

    def write(tokens: list[int], seed: int | None) -> list[int]:
        openings.append(str(TOKENIZER.decode(tokens)).split(END)[0])
        return ids(TOKENIZER, "nothing" + END)

    tree, collected = tree_on(settings(*GUESS), write, tmp_path)
    first = await tree.revise([])
    assert first is not None and not first.success
    assert await tree.revise([first, first]) is not None
    assert INTRODUCTION not in openings[0] and openings[:3] == [openings[0]] * 3
    attempt = "\n".join(["> nothing\nagain"] * 3 + [FAILED])
    assert openings[-1].endswith(f"\n\n{INTRODUCTION}\nAttempt 1:\n{attempt}\nAttempt 2:\n{attempt}\n{REQUEST}")
    assert len(collected.trajectories) == 2 and tree.num_turns == 6


def test_an_end_that_was_met_is_no_other_row_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(*GUESS)
    assert len(rows_of(config, always_red, tmp_path, search="mcts", num_tasks=1)) == 1
    # At the start 3 turns for one child, whose episode takes 2; so on for the second, with 1, and for the third.
    assert f"; {3 + 2 + 3 + 1 + 3} turns were generated" in capsys.readouterr().out
    assert len(rows_of(config, always_red, tmp_path, num_tasks=1)) == 3


def test_where_every_turn_earns_a_search_finds_more_successes_in_as_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy says the wanted word one time in four, and so earns more than half in one episode of six."""

    def num_successes(*overrides: str, **chosen: Any) -> int:
        rows = rows_of(settings(*GUESS, *overrides), guessing, tmp_path, num_tasks=40, **chosen)
        return sum(row["success"] for row in rows)

    alone = num_successes("replay.group_size=6")  # 18 turns of each task
    assert 25 < alone < 50
    monkeypatch.setattr("slipstream.tools.play.collect.EXPLORATION", 0.3)
    assert num_successes(search="mcts", width=4, budget=18) > 1.2 * alone
    assert num_successes(search="tree_of_thoughts", width=4) > 2 * alone  # 20 turns at most


@pytest.mark.parametrize("search", ["dfsdt", "mcts"])
def test_where_no_episode_ended_the_best_state_is_played_out(search: str, tmp_path: Path) -> None:
    rows = rows_of(settings(*GUESS), guessing, tmp_path, search=search, budget=1)
    assert [(row["group_id"], row["num_turns"]) for row in rows] == [(index, 3) for index in range(4)]


@pytest.mark.parametrize("template", [CHATML, FORGETS_THOUGHTS], ids=["history stands", "history is rewritten"])
@pytest.mark.parametrize(
    ("limit", "stop_reason"), [("env.max_turns=9", StopReason.DONE), ("model.max_tokens=160", StopReason.MAX_TOKENS)]
)
async def test_an_episode_in_stretches_is_the_uninterrupted_one(
    limit: str, stop_reason: StopReason, template: str, tmp_path: Path
) -> None:
    """Also where a limit is reached at the end of a stretch."""
    config = settings(*GUESS, "env.options.turns=9", "env.max_turns=9", limit)
    setup = setup_of(config, thinking, tmp_path, tokenizer=byte_tokenizer(template))
    attempt = replace(attempt_on(), task=Task(env=config.env.name, split="train", index=0))
    whole = (await play_stretch(EpisodeRecord(attempt=attempt), setup=setup, num_turns=9)).record
    assert whole.stop_reason is stop_reason
    assert len(whole.branch_starts) == (len(whole.turns) if template == FORGETS_THOUGHTS else 1)
    record = EpisodeRecord(attempt=attempt)
    while not (stretch := await play_stretch(record, setup=setup, num_turns=1)).is_over:
        assert stretch.record.stop_reason is StopReason.PREEMPTED
        record = resumed_record(attempt, stretch.record)
    assert told(stretch.record) == told(whole)


def test_episodes_whose_environment_failed_are_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("env.name=tests.tools.play.test_collect:BreaksDown")
    for search in SEARCHES:
        rows = rows_of(config, guessing, tmp_path, **searching(search, budget=12))
        assert {row["group_id"] for row in rows} == {0, 3}
        assert " episodes are left out: environment, engine or reward model failed" in capsys.readouterr().err
        failed = "BreaksDown/train/1 member 0 failed and is left out: env_failure: RuntimeError: the database is gone"
        assert failed in caplog.text
        assert "env_failure: RuntimeError: the disk is full" in caplog.text
        caplog.clear()
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="every episode failed; see the warnings above"):
        rows_of(config, guessing, tmp_path, first_task=1, num_tasks=2)
    assert not (tmp_path / "rows.jsonl").exists()


def stopping(*, after: int, how: Any = lambda: signal.raise_signal(signal.SIGINT)) -> Script:
    calls = itertools.count(1)

    def write(tokens: list[int], seed: int | None) -> list[int]:
        if next(calls) == after:
            how()
        return guessing(tokens, seed)

    return write


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("search", SEARCHES)
def test_ctrl_c_writes_the_finished_episodes(search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(*GUESS, "actors.max_episodes=2")
    rows = rows_of(config, stopping(after=100), tmp_path, code=130, search=search, num_tasks=40)
    assert 0 < len({row["group_id"] for row in rows}) < 40
    said = capsys.readouterr()
    assert "stopped; writing the finished trajectories" in said.err
    assert f"rows.jsonl: {len(rows)} trajectories of " in said.out


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_any_episode_is_over_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows_of(settings(*GUESS), stopping(after=1), tmp_path, code=130) == []
    assert "no episode has finished" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_engine_that_dies_leaves_the_finished_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(*GUESS, "actors.max_episodes=2")
    path, setups = tmp_path / "rows.jsonl", list[EpisodeSetup]()
    script = stopping(after=30, how=lambda: asyncio.ensure_future(setups[0].engine.close()))
    setups.append(setup_of(config, script, tmp_path))
    assert collect_on(setups[0], config, options(num_tasks=40), path=path) == 1
    assert 0 < len(path.read_text().splitlines()) < 120
    assert "the engine is closed; writing the finished trajectories" in capsys.readouterr().err


def test_progress_is_reported_while_episodes_are_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.common.process.long_work.EVERY_S", 0.01)
    rows_of(settings(*GUESS, "env.options.step_s=0.02"), guessing, tmp_path)
    assert re.search(r"^tasks: \d of 4.*; \d+ turns were generated$", capsys.readouterr().err, re.MULTILINE)


def test_in_a_mixture_every_environment_has_groups_of_its_own(tmp_path: Path) -> None:
    mixture = "env.mixture={one: {name: 'tests.guess:GuessEnv'}, two: {name: 'tests.guess:GuessEnv'}}"
    rows = rows_of(settings(mixture), guessing, tmp_path, first_task=1, num_tasks=2)
    expected = list(enumerate(("one/train/1", "two/train/1", "one/train/2", "two/train/2"), start=2))
    assert [(row["group_id"], row["task"]) for row in rows[::3]] == expected


def test_a_mistake_is_said_before_anything_is_played(tmp_path: Path, refused: Output) -> None:
    (tmp_path / "there.jsonl").write_text("precious")
    (tmp_path / "folder.jsonl").mkdir()
    for name, more, complaint in (
        ("there.jsonl", [], "exists; choose another file, or overwrite it with --force"),
        ("there.jsonl", ["--force"], f"no model at {tmp_path}/run/trained_model"),
        ("folder.jsonl", ["--force"], f"cannot write {tmp_path}/folder.jsonl: it exists and is not a regular file"),
        ("rows.csv", [], "must end in .jsonl or .parquet"),
        ("nowhere/rows.jsonl", [], "nowhere is not a directory; create it"),
        ("rows.jsonl", ["model.path=/nowhere"], "no model at /nowhere; give `model.path`, or `run.name` of"),
        ("rows.parquet", ["--completions=2"], "must end in .jsonl"),
        ("rows.jsonl", ["--first-task=99901", "--num-tasks=100"], "= 100000, got 100001; lower `--num-tasks`"),
    ):
        assert complaint in refused("collect", str(tmp_path / name), *more, f"run.root={tmp_path}")
    assert (tmp_path / "there.jsonl").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.jsonl", "there.jsonl"]


def test_a_run_is_gone_on_with_by_its_settings_and_model(tmp_path: Path, printed: Output) -> None:
    (tmp_path / "mine").mkdir()
    text = f"run: {{name: mine, root: {tmp_path}}}\nenv: {{max_turns: 7}}\nmodel: {{path: /began/with}}\n"
    (tmp_path / "mine" / "config.yaml").write_text(text)
    said = printed("collect", "rows.jsonl", "run.name=mine", f"run.root={tmp_path}", "--print-config")
    assert "max_turns: 7" in said and "path: ''" in said


@pytest.mark.parametrize("chosen", [{"search": "mcts"}, {"expert": True}])
def test_an_environment_that_plays_its_episodes_itself_cannot_be_searched(chosen: dict[str, Any]) -> None:
    check_collect(settings("env.name=verifiers"), options())
    with pytest.raises(ConfigError, match=r"`--(search mcts|expert)` is not possible for `env\.name` verifiers: "):
        check_collect(settings("env.name=verifiers"), options(**chosen))


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"width": 5}, "`--width` must be left out without --search, got 5; choose a search"),
        ({"budget": 9}, "`--budget` must be left out without --search dfsdt, mcts or graph_of_thoughts, got 9"),
        ({"search": "tree_of_thoughts", "budget": 9}, "`--budget` must be left out without --search dfsdt"),
        ({"search": "dfsdt", "reward_model": "x"}, "`--reward-model` must be empty without --search tree"),
        ({"search": "mcts", "completions": 2}, "`--completions` must be 0 with --search or --expert"),
        ({"completions": -1}, "`--completions` must be >= 0"),
        ({"search": "beam"}, "`--search` must be one of none, tree"),
        ({"expert": True, "search": "mcts"}, "`--search` must be none with --expert"),
        ({"noise": 0.1}, "`--noise` must be 0 without --expert"),
        *(
            ({"server": "server.yaml"} | other, "`--server` must be empty with --search, --expert")
            for other in ({"search": "mcts"}, {"expert": True}, {"completions": 2})
        ),
    ],
)
def test_an_option_without_effect_beside_others_is_refused(chosen: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CollectOptions(**chosen)


def test_a_real_engine_plays_what_the_command_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {*WORDS, "again", *(f"say {word}" for word in WORDS)}
    make_tiny_model(tmp_path / "model", texts=texts, shape=TINY, max_tokens=64, seed=0)
    path = tmp_path / "rows.parquet"
    model = [f"model.path={tmp_path}/model", "model.max_tokens=64", "sampling.max_turn_tokens=4"]
    searched = ["--num-tasks=3", "--search=mcts", "--budget=20", f"run.root={tmp_path}"]
    assert main(["collect", str(path), *model, *GUESS, *searched]) == 0
    rows = pq.read_table(path).to_pylist()
    assert {row["task"] for row in rows} == {f"tests.guess:GuessEnv/train/{index}" for index in range(3)}
    assert all(row["num_turns"] == 3 and row["policy_versions"] == [0] for row in rows)
    assert f"{path}: {len(rows)} trajectories of 3 tasks" in capsys.readouterr().out


def test_the_expert_plays_without_an_engine(tmp_path: Path, printed: Output) -> None:
    shop = ["env.name=shop", "env.max_turns=10", "model.max_tokens=400"]
    texts = vocabulary_texts(settings(*shop).env, 20)
    make_tiny_model(tmp_path / "model", texts=texts, shape=TINY, max_tokens=400, seed=0)
    rows = tmp_path / "rows.jsonl"
    command = ["collect", str(rows), f"model.path={tmp_path}/model", *shop, "--expert", "--num-tasks=6", "--force"]
    assert f"{rows}: 6 trajectories of 6 tasks, 6 successes in 6 of the tasks, by the expert" in printed(*command)
    # A part of the reward that is the score is that of the expert's episodes too.
    scored = "env.rewards.done={part: 'tests.envhub.rewards.others:gives_later', success_from: 1}"
    assert ", 0 successes" in printed(*command, scored)
