"""A process reward model from its labels to its uses: rollouts, `slipstream prm`, a guided search, and best-of-n."""

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from actors.episode_tree import Collected, EpisodeTree
from actors.group import EpisodeSetup
from actors.tree_search import START
from common.config import Config, load_config
from common.config_error import ConfigError
from common.model_config import TinyModelConfig
from common.tokenizer import load_tokenizer
from common.trajectory import Task, Trajectory
from learner.measure import Numbers
from learner.model.packed_model import ModelSettings
from learner.model.reward_model import save_reward_model
from learner.ranks import Ranks
from learner.score import RewardScorer, load_scorer
from tests.episodes import attempt_on
from tests.guess import WORDS
from tests.test_collect import setup_of
from tests.test_fit_verb import slipstream
from tools.cli import main
from tools.collect import collect_on
from tools.collect_options import CollectOptions
from tools.eval_options import EvalOptions
from tools.evaluate import check_aggregate, evaluate_on
from tools.state_values import StateValues, check_searches
from tools.study import prm
from tools.tiny_model import make_tiny_model

TURNS = 3  # of which two must say the wanted word


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prm")


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    tiny = TinyModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
    make_tiny_model(root / "model", texts=["say again", " ".join(WORDS)], config=tiny, max_tokens=64, seed=0)
    return load_config(
        None,
        [
            f"model.path={root}/model",
            "model.max_tokens=64",
            "model.dtype=float32",
            "sampling.max_turn_tokens=4",
            "env.name=tests.guess:GuessEnv",
            "env.max_turns=5",
            "replay.group_size=2",
            "learner.micro_batch_tokens=1024",
            "run.seed=3",
        ],
    )


def stage_on(config: Config, folder: Path) -> EpisodeSetup:
    """With a policy that guesses one of four words, whatever is asked."""
    tokenizer = load_tokenizer(Path(config.model.path))

    def guess(tokens: list[int], seed: int | None) -> list[int]:
        word = random.Random(seed).choice(WORDS)
        return [*tokenizer.encode(word, add_special_tokens=False), tokenizer.eos_token_id]

    return setup_of(config, guess, folder, tokenizer=tokenizer)


def collected(
    stage: EpisodeSetup, config: Config, path: Path, values: StateValues | None = None, **chosen: Any
) -> list[dict[str, Any]]:
    options = CollectOptions(**({"num_tasks": 60} | chosen))
    assert collect_on(stage, config, options, path=path, values=values) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(root: Path, config: Config) -> list[dict[str, Any]]:
    return collected(stage_on(config, root), config, root / "rows.jsonl", completions=8)


def said_right(row: dict[str, Any]) -> list[bool]:
    wanted = row["messages"][0]["content"].split()[-1]
    return [message["content"] == wanted for message in row["messages"] if message["role"] == "assistant"]


def test_a_label_is_the_share_of_completions_that_succeed(rows: list[dict[str, Any]]) -> None:
    """A guess is right one time in four, and two of three must be: after one right guess 7/16, after none 1/16."""
    assert len(rows) == 120 and {len(row["turn_labels"]) for row in rows} == {TURNS}
    by_first: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        right = said_right(row)
        first, second, last = row["turn_labels"]
        assert {label * 8 % 1 for label in row["turn_labels"]} == {0}
        assert last == float(row["success"]) == float(sum(right) >= 2)
        by_first[right[0]].append(first)
        if sum(right[:2]) != 1:  # then the last guess decides nothing
            assert second == float(sum(right[:2]) == 2)
    assert statistics.fmean(by_first[True]) == pytest.approx(7 / 16, abs=0.12)
    assert statistics.fmean(by_first[False]) == pytest.approx(1 / 16, abs=0.05)


@pytest.fixture(scope="module")
def model(root: Path, rows: list[dict[str, Any]]) -> Path:
    """A model of the process that `slipstream prm` trains on the rows."""
    done = slipstream(
        "prm",
        f"model.path={root}/model",
        "model.max_tokens=64",
        "sampling.max_turn_tokens=4",
        f"--data={root}/rows.jsonl",
        "--held-out=0.2",
        "--batch-rows=24",
        "--epochs=60",
        "optim.lr=0.005",
        f"run.root={root}/runs",
        "run.name=process",
    )
    assert done.returncode == 0, done.stderr
    assert "held out loss 0.693" in done.stderr  # before the first step, every turn has 0.5
    return root / "runs" / "process" / "trained_model"


def test_the_model_and_its_calibration_are_those_of_held_out_turns(model: Path) -> None:
    assert json.loads((model / "config.json").read_text())["id2label"] == {"0": "process_reward"}
    table = json.loads((model.parent / "calibration.json").read_text())
    assert table["turns"] == sum(each["turns"] for each in table["bins"])
    assert table["brier"] < 0.7 * table["brier_of_the_mean_label"]
    assert table["accuracy"] > 0.85 and table["calibration_error"] < 0.15


@pytest.fixture
def values(model: Path, config: Config, ranks: Ranks) -> StateValues:
    settings = ModelSettings.of(config).frozen()
    policy = Path(config.model.path)
    return StateValues(load_scorer(model, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks))


def test_a_guided_search_solves_more_tasks_in_as_many_turns(
    config: Config, values: StateValues, tmp_path: Path
) -> None:
    """No turn earns anything here. Then a search without values follows the likeliest action, and all are alike."""
    silent = replace(config, env=replace(config.env, options={"worth": 0.0}))
    chosen = {"search": "tree_of_thoughts", "width": 4, "beam": 1}

    def solved(values: StateValues | None) -> int:
        path = tmp_path / f"guided-{values is not None}.jsonl"
        found = collected(stage_on(silent, tmp_path), silent, path, values, first_task=200, **chosen)
        return len({row["group_id"] for row in found if row["success"]})

    assert solved(values) > solved(None) + 10


def test_best_of_n_is_the_episode_that_the_model_ranks_first(
    config: Config, values: StateValues, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, eval=replace(config.eval, num_tasks=30))
    options = EvalOptions(attempts=6, reward_model="given")
    assert evaluate_on(stage_on(config, tmp_path), config, options, values=values) == 0
    sampled, greedy = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    best, solved = sampled["best_of"], sampled["pass_at"]["4"]["rate"]
    assert best["attempts"] == 6 and best["low"] < best["rate"] < best["high"]
    assert sampled["success"] + 0.2 < best["rate"] and best["rate"] > 0.75 * solved
    assert "best_of" not in greedy


def test_best_of_n_between_two_sizes_is_the_line_through_them() -> None:
    ways = [prm.Way(name="a", size=str(n), tokens=10.0 * n, success=[0.0, n - 1.0]) for n in (1, 2)]
    assert prm.at_tokens(ways, 15.0).tolist() == [0.0, 0.5]
    assert prm.at_tokens(ways, 99.0).tolist() == [0.0, 1.0]


class Counted(RewardScorer):
    """A scorer that keeps the sizes of its batches."""

    batches: ClassVar[list[int]] = []

    def values(self, trajectories: Sequence[Trajectory]) -> list[Numbers]:
        self.batches.append(len(trajectories))
        return super().values(trajectories)


def test_waiting_episodes_are_scored_in_one_batch_and_an_error_reaches_each(
    config: Config, values: StateValues, tmp_path: Path
) -> None:
    scorer = values.scorer
    counted = Counted(model=scorer.model, weight=1.0, micro_batch_tokens=scorer.micro_batch_tokens, ranks=scorer.ranks)

    async def asked() -> list[Numbers]:
        found, service = Collected(), StateValues(counted)
        attempt = replace(attempt_on(), task=Task(env=config.env.name, split="train", index=0))
        tree = EpisodeTree(attempt, setup=stage_on(config, tmp_path), room=asyncio.Semaphore(4), collected=found)
        await asyncio.gather(*(tree.play_out(START, max_turns=TURNS) for _ in range(10)))
        together = await asyncio.gather(*map(service.of_turns, found.trajectories), return_exceptions=True)
        if isinstance(together[0], ConfigError):
            assert [str(each) for each in together] == [str(together[0])] * 10
            raise together[0]
        alone = await service.of_turns(found.trajectories[0])
        assert together[0] == pytest.approx(alone)
        return together

    assert [len(each) for each in asyncio.run(asked())] == [TURNS] * 10
    assert sum(Counted.batches) == 11 and len(Counted.batches) <= 3
    with torch.no_grad():
        scorer.model.score.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="has a score that is not finite"):
        asyncio.run(asked())


def test_what_a_model_of_outcome_cannot_do_is_refused(
    config: Config, values: StateValues, tmp_path: Path, ranks: Ranks
) -> None:
    outcome = tmp_path / "outcome"
    save_reward_model(values.scorer.model, outcome, ranks=ranks)
    settings, policy = ModelSettings.of(config).frozen(), Path(config.model.path)
    scorer = load_scorer(outcome, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks)
    check_searches(values)
    with pytest.raises(ConfigError, match="a search needs a value of every state; give a folder of `slipstream prm`"):
        check_searches(StateValues(scorer))
    check_aggregate(StateValues(scorer), "last")
    with pytest.raises(ConfigError, match="`--aggregate` must be last for a reward model of outcome"):
        check_aggregate(StateValues(scorer), "min")


def test_options_without_effect_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = str(tmp_path / "rows.jsonl")
    for arguments, complaint in (
        (
            ["collect", rows, "--search=dfsdt", "--reward-model=x"],
            "`--reward-model` must be empty without --search tree",
        ),
        (["collect", rows, "--search=mcts", "--completions=2"], "`--completions` must be 0 with --search or --expert"),
        (["collect", rows, "--completions=-1"], "`--completions` must be >= 0"),
        (["eval", "--reward-model=x"], "`--reward-model` must be empty without --attempts from 2 on"),
        (["eval", "--attempts=2", "--reward-model=x", "--aggregate=mean"], "`--aggregate` must be one of last, min"),
        (["collect", str(tmp_path / "rows.parquet"), "--completions=2"], "the file name must end in .jsonl"),
    ):
        assert main(arguments) == 2
        assert complaint in capsys.readouterr().err
