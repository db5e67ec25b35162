"""A process reward model from its labels to its uses: rollouts, `fit prm`, a guided search, and best-of-n."""

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.actors.search.tree_search import START
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.reward_protocol import ScoredEpisode
from slipstream.common.records.trajectory import Task
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.score import RewardScorer, branches, load_scorer
from slipstream.learner.credit.token_rewards import Numbers
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.learner.model.packed_model import ModelSettings
from slipstream.learner.model.reward_model import save_reward_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.cli.fit_verb import _examples
from slipstream.tools.data.fit_rows import read_samples
from slipstream.tools.play.collect import collect_on
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.evaluate import evaluate_on
from slipstream.tools.play.state_values import StateValues, check_searches, scored_here
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.episode.episodes import attempt_on, ids
from tests.actors.tool_parsing import HERMES, parsing
from tests.common.text.small_tokenizer import CHATML, END, FORGETS_THOUGHTS, byte_tokenizer
from tests.guess import WORDS
from tests.tools.cli.test_fit_verb import slipstream
from tests.tools.play.test_collect import GUESS, settings, setup_of, thinking

HAS_CALLS = ("model.tool_parser=hermes", "warm_start.episodes=0")  # what `env.action_format=tools` needs
TURNS = 3  # of which two must say the wanted word


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prm")


def config_of(root: Path, *settings: str) -> Config:
    """A game of guesses, and a tiny model in `root` that knows its words."""
    tiny = TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
    make_tiny_model(root / "model", texts=["say again", " ".join(WORDS)], shape=tiny, max_tokens=64, seed=0)
    sizes = [f"model.path={root}/model", "model.max_tokens=64", "model.dtype=float32", "sampling.max_turn_tokens=4"]
    return load_config(None, [*sizes, *GUESS, "replay.group_size=2", "learner.micro_batch_tokens=1024", *settings])


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    return config_of(root, "run.seed=3")


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


def test_a_label_is_the_share_of_completions_that_succeed(rows: list[dict[str, Any]]) -> None:
    """A guess is right one time in four, and two of three must be: after one right guess 7/16, after none 1/16."""
    assert len(rows) == 120 and {len(row["turn_labels"]) for row in rows} == {TURNS}
    by_first: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        wanted = row["messages"][0]["content"].split()[-1]
        right = [message["content"] == wanted for message in row["messages"] if message["role"] == "assistant"]
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
    """A model of the process that `slipstream fit prm` trains on the rows."""
    sizes = [f"model.path={root}/model", "model.max_tokens=64", "sampling.max_turn_tokens=4", "optim.lr=0.01"]
    options = [f"--data={root}/rows.jsonl", "--held-out=0.2", "--batch-rows=96", "--epochs=60"]
    done = slipstream("fit", "prm", *sizes, *options, f"run.root={root}/runs", "run.name=process")
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
def scorer(model: Path, config: Config, ranks: Ranks) -> RewardScorer:
    settings, policy = ModelSettings.of(config).frozen(), Path(config.model.path)
    return load_scorer(model, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks)


@pytest.fixture
def values(scorer: RewardScorer) -> StateValues:
    return scored_here(scorer)


def test_a_guided_search_solves_more_in_as_many_turns(
    config: Config, values: StateValues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn earns anything here. Then a search without values follows the likeliest action, and all are alike."""
    silent = replace(config, env=replace(config.env, options={"worth": 0.0}))
    monkeypatch.setattr("slipstream.tools.play.collect.BEAM", 1)
    chosen = {"search": "tree_of_thoughts", "width": 4}

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
    best, solved = sampled["best_of"]["reward_model"]["6"], sampled["pass_at"]["4"]["rate"]
    assert best["low"] < best["rate"] < best["high"]
    assert sampled["success"] + 0.2 < best["rate"] and best["rate"] > 0.75 * solved
    assert "best_of" not in greedy


@pytest.mark.parametrize(
    ("template", "action_format"),
    [(CHATML, "plain"), (FORGETS_THOUGHTS, "plain"), (HERMES, "tools")],
    ids=["history stands", "history is rewritten", "actions are calls"],
)
def test_a_turn_is_scored_after_the_very_tokens_after_which_it_was_labelled(
    template: str, action_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(template)
    tokenizer.save_pretrained(tmp_path / "model")
    chosen = [f"model.path={tmp_path}/model", f"env.action_format={action_format}", "sampling.max_turn_tokens=128"]
    config = settings(*GUESS, *chosen, *HAS_CALLS)
    stage, found = setup_of(config, thinking, tmp_path, tokenizer=tokenizer), Collected()
    if action_format == "tools":
        stage = replace(setup_of(config, calling, tmp_path, tokenizer=tokenizer), parse=parsing(tokenizer=tokenizer))
    monkeypatch.setattr("slipstream.tools.play.collect.Collected", lambda: found)
    path = str(tmp_path / "rows.jsonl")
    collected(stage, config, Path(path), num_tasks=3, completions=2)
    samples, _, left_out = read_samples(FitOptions(data=path, held_out=0.0), goal="prm")
    (examples,) = _examples(config, "prm", [samples], left_out, data=path)
    labelled = {prefix for example in examples for (side,) in example for prefix in prefixes(side)}
    roots = [each for each in found.trajectories if (each.group_id, each.member) in found.labels]
    episodes = [ScoredEpisode.of(each) for each in roots]
    scored = {prefix for each in episodes for branch in branches(each, each.turn_stops) for prefix in prefixes(branch)}
    assert labelled == scored and len(scored) > len(roots)
    assert (len(roots[0].branch_starts) > 1) == (template == FORGETS_THOUGHTS)


def calling(tokens: list[int], seed: int | None) -> list[int]:
    """Guess by a call, sometimes by a malformed one."""
    chance = random.Random(seed)
    call = json.dumps({"name": "act", "arguments": {"action": chance.choice(WORDS)}})
    text = f"so\n<tool_call>\n{call[: -1 if chance.random() < 0.2 else None]}\n</tool_call>{END}"
    return ids(byte_tokenizer(HERMES), text)


def prefixes(sequence: TokenSequence) -> list[tuple[int, ...]]:
    return [tuple(sequence.tokens[: place + 1].tolist()) for place in np.flatnonzero(sequence.loss_mask)]


class Counted(RewardScorer):
    batches: ClassVar[list[int]] = []

    def values(self, episodes: Sequence[ScoredEpisode]) -> list[Numbers]:
        self.batches.append(len(episodes))
        return super().values(episodes)


def test_waiting_episodes_are_scored_in_one_batch(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    counted = Counted(model=scorer.model, weight=1.0, micro_batch_tokens=scorer.micro_batch_tokens, ranks=scorer.ranks)

    async def asked() -> list[Numbers]:
        found, service = Collected(), scored_here(counted)
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


def test_what_outcome_cannot_do_is_refused(config: Config, scorer: RewardScorer, tmp_path: Path, ranks: Ranks) -> None:
    folder = tmp_path / "outcome"
    save_reward_model(scorer.model, folder, ranks=ranks)
    settings, policy = ModelSettings.of(config).frozen(), Path(config.model.path)
    outcome = scored_here(load_scorer(folder, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks))
    check_searches(scored_here(scorer))
    with pytest.raises(ConfigError, match="a search needs a value of every state; give a model of `slipstream fit"):
        check_searches(outcome)
