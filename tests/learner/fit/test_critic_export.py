"""The critic of a run as the value of states in a search: exported, asked, and refused where it would be wrong."""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.actors.search.tree_search import START
from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.reward_protocol import RETURN, RETURN_TO_GO, ScoredEpisode
from slipstream.common.records.trajectory import Outcome, StopReason, Task, Trajectory
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.reward_client import RewardClient
from slipstream.learner.batch.pack import sequences_of
from slipstream.learner.credit.score import RewardScorer, load_reward_scorer, load_scorer
from slipstream.learner.fit.critic_export import export_critic, predicted
from slipstream.learner.learner import Learner
from slipstream.learner.model.packed_model import ModelSettings
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.play.evaluate import check_no_critic
from slipstream.tools.play.state_values import Numbers, StateValues, check_searches, scored_here
from slipstream.tools.run.export_options import ExportOptions
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.episode.episodes import attempt_on
from tests.envhub.rewards.test_rewards import episode_of
from tests.guess import WORDS, GuessEnv
from tests.learner.even_game import load_player, play, save, train, values_of
from tests.tools.play.test_prm import TURNS, collected, stage_on
from tests.tools.serve.test_serve_rewards import listening, reads

PPO = ["run.name=ppo", "objective.advantage=gae", "optim.lr=3e-3", "optim.critic_lr=2e-2", "learner.steps=30"]
PPO += ["learner.micro_batch_tokens=512", "model.max_tokens=64", "model.dtype=float32"]
BY_TURN = "objective.allocation=per_turn"
# How the critic is made, where the rewards are, and what it then predicts.
CRITICS = {
    "separate, rewards at their turns": (["objective.critic=own", BY_TURN], RETURN_TO_GO),
    "separate, beside adapters": (["objective.critic=own", "model.lora.rank=4"], RETURN),
    "shared, rewards at the last token": (["objective.critic=shared"], RETURN),
    "shared, on adapters": (["objective.critic=shared", "model.lora.rank=4", BY_TURN], RETURN_TO_GO),
    "separate, over turns": (["objective.critic=own", "objective.advantage=bi_level_gae"], RETURN_TO_GO),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    tiny = TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2)
    texts = ["say again", " ".join(WORDS), " ".join(f"w{number}" for number in range(60))]
    make_tiny_model(folder, texts=texts, shape=tiny, max_tokens=64, seed=0)
    return folder


def trained(folder: Path, root: Path, ranks: Ranks, *settings: str, steps: int = 2) -> tuple[Learner, list[Trajectory]]:
    """A learner whose run has a checkpoint after `steps`, and episodes of its policy."""
    config = load_config(None, [f"model.path={folder}", f"run.root={root}", *PPO, *settings])
    run_dir = RunDir(root, config.run.name)
    run_dir.create()
    run_dir.config.write_text(dump_config(config))
    learner, player = load_player(config, root, ranks)
    train(learner, player, steps=steps)
    save(learner)
    return learner, [each for group in play(learner, player).groups for each in group.trajectories]


def before(trajectory: Trajectory, turn: int) -> Trajectory:
    """The record of the state in which `turn` begins, as a search has it: with the answer to the turn before."""
    stop = trajectory.turns[turn].start
    starts = [start for start in trajectory.branch_starts if start < stop]
    cut = {"tokens": trajectory.tokens[: 4 * stop], "turns": trajectory.turns[:turn], "branch_starts": starts}
    over = {"stop_reason": StopReason.PREEMPTED, "outcome": Outcome.PREEMPTED}
    return msgspec.structs.replace(trajectory, **cut, **over)


def loaded(folder: Path, config: Config, ranks: Ranks) -> RewardScorer:
    settings, policy = ModelSettings.of(config).frozen(), Path(config.model.path)
    return load_scorer(folder, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks)


@pytest.mark.parametrize("name", CRITICS)
def test_an_exported_critic_has_a_learners_values(model_folder: Path, tmp_path: Path, ranks: Ranks, name: str) -> None:
    overrides, kind = CRITICS[name]
    learner, episodes = trained(model_folder, tmp_path, ranks, *overrides)
    folder = export_critic(learner.config, learner.run_dir, ranks=ranks)
    assert folder == learner.run_dir.path / "trained_critic"
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": kind}
    scorer = loaded(folder, learner.config, ranks)
    values = scored_here(scorer)
    check_searches(values)
    rewritten = msgspec.structs.replace(episodes[2], branch_starts=[0, 4])  # its second turn in a sequence of its own
    found = []
    for episode in [*episodes[:6], rewritten]:
        of_tokens = values_of(learner, sequences_of(episode, advantage=0.0), micro_batch_tokens=64)
        starts = np.cumsum([0, *(turn.stop - turn.start for turn in episode.turns)])[:-1]
        asked = msgspec.structs.replace(ScoredEpisode.of(episode), turn_stops=[turn.start for turn in episode.turns])
        (of_turns,) = scorer.values([asked])
        assert of_turns == pytest.approx(of_tokens[starts], abs=1e-5)
        earned = sum(episode.turns[0].rewards.values()) if kind == RETURN_TO_GO else 0.0
        of_state = asyncio.run(values.of_state(before(episode, 1)))
        assert of_state == pytest.approx(of_tokens[starts[1]] + earned, abs=1e-5)
        assert asyncio.run(values.of_state(episode)) == episode.total_reward
        found += of_turns.tolist()
    assert np.ptp(found) > 0.05 and abs(scorer.model.offset) > 0.1  # neither the head nor the offset is nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run whose critic the command exported."""

    learner: Learner
    episodes: list[Trajectory]
    folder: Path


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Run:
    root = tmp_path_factory.mktemp("runs")
    learner, episodes = trained(model_folder, root, ranks, "objective.critic=own", BY_TURN)
    done = exported(root)
    assert done.returncode == 0, done.stderr
    folder = learner.run_dir.trained_critic
    assert done.stdout.strip() == str(folder)
    return Run(learner=learner, episodes=episodes, folder=folder)


def exported(root: Path) -> subprocess.CompletedProcess[str]:
    verb = ["slipstream.tools.cli.cli", "export", f"run.root={root}", "run.name=ppo", "--critic"]
    return subprocess.run([sys.executable, "-m", *verb], capture_output=True, text=True, timeout=120)


@pytest.fixture
def scorer(run: Run, ranks: Ranks) -> RewardScorer:
    return loaded(run.folder, run.learner.config, ranks)


@pytest.fixture
def guess(model_folder: Path) -> Config:
    settings = [f"model.path={model_folder}", "model.max_tokens=64", "model.dtype=float32"]
    settings += ["sampling.max_turn_tokens=4", "env.name=tests.guess:GuessEnv", "env.max_turns=5"]
    return load_config(None, [*settings, "learner.micro_batch_tokens=1024"])


async def test_a_state_is_worth_its_rewards_so_far_and_what_transformers_says_before_the_next_turn(
    guess: Config, scorer: RewardScorer, tmp_path: Path
) -> None:
    tokenizer, stage = load_tokenizer(Path(guess.model.path)), stage_on(guess, tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(scorer.model.folder, dtype=torch.float32).eval()
    task = Task(env=guess.env.name, split="train", index=0)
    attempt, values = replace(attempt_on(), task=task), scored_here(scorer).of_state
    tree = EpisodeTree(attempt, setup=stage, room=asyncio.Semaphore(4), collected=Collected(), values=values)
    first = await tree.expand(START, width=4)
    second = await tree.expand(first[0], width=4)
    states = [*first, *second, *await tree.expand(second[0], width=4)]
    assert {state.is_over for state in states} == {True, False}
    assert {state.total_reward for state in states} >= {0.0, 1.0}
    opening = (await GuessEnv().reset(task)).messages[0].content
    for state in states:
        if state.is_over:
            assert state.value == state.total_reward and len(state.actions) == TURNS
            continue
        messages = [{"role": "user", "content": opening}]
        for action in state.actions:
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": "again"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        expected = theirs(input_ids=ids["input_ids"]).logits.item() + scorer.model.offset + state.total_reward
        assert state.value == pytest.approx(expected, abs=1e-4)


def test_mcts_asks_the_critic_in_every_new_state(guess: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    here, asked = scored_here(scorer), list[ScoredEpisode]()

    async def values(episode: ScoredEpisode) -> Numbers:
        asked.append(episode)
        return await here.of_episode(episode)

    critic = replace(here, of_episode=values)
    chosen = {"search": "mcts", "width": 3, "budget": 12, "num_tasks": 3}
    rows = collected(stage_on(guess, tmp_path), guess, tmp_path / "rows.jsonl", critic, **chosen)
    assert len({row["group_id"] for row in rows}) == 3
    assert len(asked) >= 9 and all(each.turn_stops == [len(each.token_array())] for each in asked)


async def test_a_served_critic_has_the_same_values_and_is_no_part_of_a_reward(run: Run, scorer: RewardScorer) -> None:
    state, here = before(run.episodes[0], 1), scored_here(scorer)
    episode = replace(episode_of(), scored=ScoredEpisode.of(run.episodes[0]))
    async with listening(scorer) as url:
        client = RewardClient(url=url, reads=reads(scorer))
        card = await client.card()

        async def values(asked: ScoredEpisode) -> Numbers:
            return np.array((await client.values(asked)).values)

        there = StateValues(name=url, kind=card.kind, of_episode=values)
        with pytest.raises(EnvError, match="serves a critic, whose values are no rewards; serve a model of"):
            await client(episode)
        assert await there.of_state(state) == pytest.approx(await here.of_state(state), abs=1e-6)


def test_what_a_critic_is_no_model_for_is_refused(run: Run, guess: Config, ranks: Ranks, tmp_path: Path) -> None:
    critic = scored_here(loaded(run.folder, guess, ranks))
    with pytest.raises(ConfigError, match="is a critic: its value of a finished episode is the return itself"):
        check_no_critic(critic)
    config = load_config(None, [f"model.path={guess.model.path}", f"objective.reward_model={run.folder}"])
    with pytest.raises(ConfigError, match="is a critic, whose values are no rewards; give a model of"):
        load_reward_scorer(config.objective, run.learner.model, micro_batch_tokens=64, ranks=ranks)
    text = (run.folder / "config.json").read_text()
    for offset in ("NaN", "Infinity", "null", "true", '"1"', "[1]"):
        broken = tmp_path / "broken"
        shutil.copytree(run.folder, broken, dirs_exist_ok=True)
        (broken / "config.json").write_text(json.dumps(json.loads(text) | {"score_offset": json.loads(offset)}))
        with pytest.raises(ConfigError, match=r"have a finite number `score_offset`, got .*; export the critic again"):
            loaded(broken, guess, ranks)


def test_a_critic_that_predicts_no_return_is_refused() -> None:
    for changes, why in (
        ({"advantage": "group_standardised", "critic": "none"}, r"no critic \(`objective\.critic=none`\); train one"),
        ({"gamma": 0.99}, r"objective\.gamma is 0\.99, so its critic predicts discounted returns"),
        ({"advantage": "bi_level_gae", "turn_gamma": 0.9}, r"objective\.turn_gamma is 0\.9, .* discounted returns"),
        ({"kl_place": "reward", "kl_coefficient": 0.1}, r"kl_place is reward, .* returns less their KL penalties"),
        ({"reward_model": "FOLDER"}, r"reward_model is FOLDER, .* returns with that model's scores"),
    ):
        with pytest.raises(ConfigError, match=why):
            predicted(ObjectiveConfig(**({"advantage": "gae", "critic": "own"} | changes)))


def test_a_run_without_a_trained_critic_is_refused(model_folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    learner, _ = trained(model_folder, tmp_path, ranks, "objective.critic=own", steps=0)
    with pytest.raises(ConfigError, match="has no checkpoint of a critic that was trained; continue the run until"):
        export_critic(learner.config, learner.run_dir, ranks=ranks)
    without = replace(learner.config, objective=ObjectiveConfig())
    learner.run_dir.config.write_text(dump_config(without))
    done = exported(tmp_path)
    assert done.returncode == 2 and "slipstream export: the run trained no critic" in done.stderr
    assert not learner.run_dir.trained_critic.exists()
    for given in ({"to_hub": "maker/mine"}, {"public": True}):
        with pytest.raises(ConfigError, match="`--critic` must be without --to-hub and --public, got True; a critic"):
            ExportOptions(critic=True, **given)  # type: ignore[arg-type]
