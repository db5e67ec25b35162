"""A reward model's word becomes one more reward of each episode, the same that transformers would give."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.config.objective_config import ADVANTAGES, ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.reward_protocol import PROCESS, ScoredEpisode
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.learner.batch.batch import Batch
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.score import COMPONENT, RewardScorer, load_reward_scorer, reads_turns, rewarded
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.model.packed_model import PackedModel, load_kind, load_model
from slipstream.learner.model.reward_model import RewardModel, save_reward_model
from slipstream.learner.objective.coherence import check_coherence
from slipstream.learner.objective.turn_labels import progress
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.learner.even_game import group_of, recorded
from tests.replay.records.attempts import turn
from tests.tools.run.tiny_model import FLOAT32

OWN = "tests.learner.credit.test_score:halves"
WORDS = " ".join(f"w{number}" for number in range(60))


def make_model(folder: Path, *, words: str = WORDS) -> Path:
    tiny = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1)
    make_tiny_model(folder, texts=[words], shape=tiny, max_tokens=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> PackedModel:
    return load_model(make_model(tmp_path_factory.mktemp("policy") / "model"), ranks=ranks, settings=FLOAT32)


@pytest.fixture(scope="module")
def scorer_folder(policy: PackedModel, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    model = load_kind(RewardModel, policy.folder, ranks=ranks, settings=FLOAT32)
    torch.manual_seed(7)
    with torch.no_grad():
        model.score.weight.to_local().copy_(torch.randn(1, 32))
    folder = tmp_path_factory.mktemp("reward_model") / "trained_model"
    save_reward_model(model, folder, ranks=ranks)
    return folder


@pytest.fixture(scope="module")
def process_folder(policy: PackedModel, scorer_folder: Path, ranks: Ranks) -> Path:
    model = scorer_of(config_for(policy, scorer_folder), policy, ranks)
    folder = scorer_folder.with_name("process")
    save_reward_model(model.model, folder, kind=PROCESS, ranks=ranks)
    return folder


def episode(seed: int, *, branches: tuple[int, ...] = (0,), length: int = 12) -> Trajectory:
    """Two turns that earn 0, in all but their tokens like any other episode."""
    tokens = np.random.default_rng(seed).integers(8, 60, length).tolist()
    mask = [place in (4, 5, 10, 11) for place in range(length)]
    logprobs = [-1.0 * each for each in mask]
    return recorded(tokens, logprobs, mask, turns=[turn(4, 6), turn(10, 12)], branch_starts=branches)


def config_for(policy: PackedModel, scorer_folder: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.path={policy.folder}", f"objective.reward_model={scorer_folder}", *overrides])


def batch_of(*groups: Sequence[Trajectory]) -> Batch:
    numbered = [group_of(episodes, group_id=number) for number, episodes in enumerate(groups)]
    return Batch(groups=numbered, num_dropped={}, next_group_id=len(groups))


def scorer_of(config: Config, model: PackedModel, ranks: Ranks) -> RewardScorer | None:
    num_tokens = config.learner.micro_batch_tokens
    return load_reward_scorer(config.objective, model, micro_batch_tokens=num_tokens, ranks=ranks)


def test_an_episode_earns_the_score_of_its_last_branch(policy: PackedModel, scorer_folder: Path, ranks: Ranks) -> None:
    config = config_for(policy, scorer_folder, "objective.reward_model_weight=0.5")
    scorer = scorer_of(config, policy, ranks)
    episodes = [episode(0), episode(1), episode(2, branches=(0, 7)), episode(3)]
    scored = scorer.scored(batch_of(episodes[:2], episodes[2:]))
    assert scored.next_group_id == 2
    assert teaches(group_of(episodes[:2]), objective=config.objective), "equal returns are scored apart"
    assert not teaches(group_of(episodes[:2]), objective=Config().objective)
    theirs = AutoModelForSequenceClassification.from_pretrained(scorer_folder, dtype=torch.float32).eval()
    for before, after in zip(episodes, (each for group in scored.groups for each in group.trajectories), strict=True):
        start = before.branch_starts[-1]
        ids = torch.tensor(before.token_array()[start:].copy()).long()[None]
        expected = 0.5 * theirs(input_ids=ids).logits.item()
        first, last = after.turns
        assert first.rewards == {"task": 0.0}
        assert last.rewards == {"task": 0.0, COMPONENT: pytest.approx(expected, rel=1e-4)}
        assert after.total_reward == pytest.approx(expected, rel=1e-4) and expected != 0
        assert after.tokens == before.tokens
    assert scorer.scored(scored) == scored  # scoring twice gives the same rewards


def test_a_turn_earns_its_progress_at_its_last_token(policy: PackedModel, process_folder: Path, ranks: Ranks) -> None:
    config = config_for(policy, process_folder, "objective.reward_model_weight=0.5", "objective.allocation=per_turn")
    scorer = scorer_of(config, policy, ranks)
    episodes = [episode(0), episode(1), episode(2, branches=(0, 7)), episode(3)]
    scored = scorer.scored(batch_of(episodes))
    theirs = AutoModelForSequenceClassification.from_pretrained(process_folder, dtype=torch.float32).eval()
    for before, after in zip(episodes, scored.groups[0].trajectories, strict=True):
        values = []
        for each in before.turns:
            start = max(start for start in before.branch_starts if start < each.stop)
            ids = torch.tensor(before.token_array()[start : each.stop].copy()).long()[None]
            values.append(torch.sigmoid(theirs(input_ids=ids).logits).item())
        first, last = after.turns
        assert first.rewards == {"task": 0.0, COMPONENT: pytest.approx(0.5 * values[0], rel=1e-4)}
        assert last.rewards == {"task": 0.0, COMPONENT: pytest.approx(0.5 * (values[1] - values[0]), rel=1e-3)}
        assert after.total_reward == pytest.approx(0.5 * values[1], rel=1e-4)
    assert scorer.scored(scored) == scored
    # Of four siblings, the advantage at the second turn compares its own reward, and at the first the return.
    tokens = sequences_with_advantages(scored.groups, objective=config.objective)
    to_go = [progress(values)[1] for values in scorer.values([ScoredEpisode.of(each) for each in episodes])]
    second = {sequence.trajectory: float(sequence.advantages[-1]) for sequence in tokens}
    assert np.argsort([second[place] for place in range(4)]).tolist() == np.argsort(to_go).tolist()


def test_a_model_of_the_process_needs_an_objective_that_reads_turns(
    policy: PackedModel, process_folder: Path, scorer_folder: Path, ranks: Ranks
) -> None:
    with pytest.raises(ConfigError, match=r"is a process reward model, .* set objective\.allocation=per_turn"):
        scorer_of(config_for(policy, process_folder), policy, ranks)
    for fitting in ("objective.allocation=per_turn", "objective.advantage=gigpo"):
        assert scorer_of(config_for(policy, process_folder, fitting), policy, ranks)
        assert scorer_of(config_for(policy, scorer_folder, fitting), policy, ranks)


BESIDE_VTRACE = {"critic": "own", "surrogate": "policy_gradient", "correction": "none"}
OBJECTIVES: list[dict[str, Any]] = [
    {"advantage": advantage, "allocation": allocation, **more}
    for advantage in (*(name for name in ADVANTAGES if name != "tree"), OWN)
    for allocation in ("last_token", "per_turn")
    for more in ({}, {"critic": "own"}, {"critic": "shared"}, BESIDE_VTRACE)
]


def test_a_model_of_the_process_is_accepted_exactly_where_the_order_of_its_values_teaches() -> None:
    """In all objectives: two episodes whose last probability is the same, and that of the first turn is not."""
    accepted = []
    for settings in OBJECTIVES:
        try:
            config = dataclasses.replace(Config(), objective=ObjectiveConfig(reward_model="folder", **settings))
            check_coherence(config)
        except ConfigError:
            continue
        differs = not np.allclose(learned(config, 0.2), learned(config, 0.8), atol=1e-5)
        assert differs == reads_turns(config.objective), settings
        accepted.append(differs)
    assert accepted.count(True) >= 8 and accepted.count(False) >= 8


def learned(config: Config, first: float) -> np.ndarray:
    """The advantages of four siblings, of which the first has the probability `first` after its first turn."""
    members = [
        rewarded(in_known_states(episode(number, branches=branches)), progress(np.array([value, 0.6 - number / 10])))
        for number, (value, branches) in enumerate([(first, (0,)), (0.3, (0, 7)), (0.5, (0,)), (0.6, (0,))])
    ]
    measured = Measured(values=np.zeros(16), current_logprobs=np.full(16, -1.0))
    found = sequences_with_advantages([group_of(members)], objective=config.objective, measured=measured)
    return np.concatenate([each.advantages for each in found])


def in_known_states(trajectory: Trajectory) -> Trajectory:
    turns = [msgspec.structs.replace(each, state_key=f"s{place}") for place, each in enumerate(trajectory.turns)]
    return msgspec.structs.replace(trajectory, turns=turns)


def halves(returns: Sequence[float]) -> list[float]:
    """An advantage of the user's."""
    return [each / 2 for each in returns]


def test_scores_beside_adapters_are_those_beside_none(policy: PackedModel, process_folder: Path, ranks: Ranks) -> None:
    config = config_for(policy, process_folder, "objective.allocation=per_turn")
    episodes = [ScoredEpisode.of(episode(0)), ScoredEpisode.of(episode(1))]
    adapted = load_model(policy.folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=LoraConfig(rank=4)))
    scorers = (scorer_of(config, model, ranks) for model in (policy, adapted))
    alone, beside = (np.concatenate(scorer.values(episodes)) for scorer in scorers)
    assert alone.tolist() == beside.tolist()


def test_a_score_that_is_not_finite_ends_the_run(policy: PackedModel, scorer_folder: Path, ranks: Ranks) -> None:
    scorer = scorer_of(config_for(policy, scorer_folder), policy, ranks)
    with torch.no_grad():
        scorer.model.score.weight.to_local().fill_(float("nan"))
    with pytest.raises(ConfigError, match="has a score that is not finite; train it again"):
        scorer.scored(batch_of([episode(0)]))


def test_another_template_is_refused(policy: PackedModel, scorer_folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    other = shutil.copytree(scorer_folder, tmp_path / "other")
    tokenizer = load_tokenizer(other)
    tokenizer.chat_template += "{# another #}"
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="has another chat template than the policy"):
        scorer_of(config_for(policy, other), policy, ranks)


def test_without_a_name_there_is_no_scorer_and_what_is_none_is_refused(policy: PackedModel, ranks: Ranks) -> None:
    assert scorer_of(load_config(None, [f"model.path={policy.folder}"]), policy, ranks) is None
    with pytest.raises(ConfigError, match=r"has no score.weight with one output"):
        scorer_of(config_for(policy, policy.folder), policy, ranks)


def test_a_reward_model_with_another_tokenizer_is_refused(scorer_folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    other = make_model(tmp_path / "other", words=WORDS.replace("w1", "v1"))
    policy = load_model(other, ranks=ranks, settings=FLOAT32)
    with pytest.raises(ConfigError, match="has another tokenizer than the policy"):
        scorer_of(config_for(policy, scorer_folder), policy, ranks)


def test_groups_are_not_chosen_by_returns_that_are_scored_later(policy: PackedModel, scorer_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be 1 with objective\.reward_model"):
        check_coherence(config_for(policy, scorer_folder, "replay.keep_fraction=0.5"))
    with pytest.raises(ConfigError, match=r"must be 1 without objective\.reward_model"):
        load_config(None, ["objective.reward_model_weight=2"])
