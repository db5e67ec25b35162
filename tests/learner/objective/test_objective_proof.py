"""A proof by machine: of every objective that the linter accepts, each key acts, and no token weighs without a bound.

The objectives are those of all presets, and random ones. What a change of one key does is seen on one batch, in the
gradient of every token, in what the critic is trained towards, in which groups are kept, and in what the guard says.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.objective_config import ADVANTAGES, ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Trajectory
from slipstream.learner.batch.pack import Packed, count_loss_tokens, count_trajectories, pack
from slipstream.learner.credit.measure import Measured
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.objective.guard import Evidence, decide
from slipstream.learner.objective.normalisation import loss_divisor
from slipstream.learner.probation.loss_probe import MAX_WEIGHT
from slipstream.learner.step.loss import policy_loss
from slipstream.replay.records.ticket import Group
from tests.learner.even_game import group_of, recorded
from tests.learner.objective.objectives import check_objective
from tests.learner.policies import loss_tokens, of_lengths
from tests.replay.records.attempts import turn
from tests.typecheck import unchecked

PRESETS = sorted((Path(__file__).parents[3] / "conf" / "objective").glob("*.yaml"))
# What advantages and their divisor are made with; all else is the loss's and the guard's.
OF_WEIGHING = ["advantage", "allocation", "gamma", "gae_lambda", "turn_gamma", "critic"]
OF_WEIGHING += ["kl_coefficient", "kl_place", "normalisation", "normalisation_tokens"]
# What these do is no matter of one batch; each has tests of its own.
ELSEWHERE = {"critic": "test_critic", "critic_warmup_steps": "test_critic", "reference_model": "test_distillation"}
ELSEWHERE |= {"reward_model": "test_score", "reward_model_weight": "test_score"}
WORDS = {
    "advantage": tuple(name for name in ADVANTAGES if name != "distillation"),
    "allocation": ("last_token", "per_turn"),
    "surrogate": ("ppo_clip", "gspo", "cispo", "dppo_tv", "policy_gradient"),
    "correction": ("none", "token_mask"),
    "kl_place": ("loss", "reward"),
    "normalisation": ("tokens", "sequences", "constant"),
}
SWITCHED_ON = {"dual_clip": 3.0, "max_negative_kl": 0.05, "kl_coefficient": 0.05, "entropy_bonus": 0.01}
NUMBERS = [item.name for item in dataclasses.fields(ObjectiveConfig) if item.name not in {**ELSEWHERE, **WORDS}]
SURENESS = ((0.02, 2.0), (3.0, 9.0))  # nats below a probability of 1: some bounds are of probabilities
NUM_GROUPS, NUM_MEMBERS, TURN_TOKENS = 160, 4, 4


AS_OTHERS = ("grpo", "dr_grpo", "reinforce_pp", "rloo", "starpo_s")  # whose parts are those of other presets
IN_CI = [pytest.param(each, marks=pytest.mark.long) if each.stem in AS_OTHERS else each for each in PRESETS]


@pytest.mark.parametrize("preset", [None, *IN_CI], ids=lambda path: path.stem if path else "default")
def test_every_key_of_a_preset_acts_or_is_refused_and_no_weight_is_above_the_limit(preset: Path | None) -> None:
    config = load_config(str(preset) if preset else None, [])
    check_objective(config)
    assert inert_changes(config) == []
    assert largest_weight(config.objective) <= MAX_WEIGHT * (1 + 1e-9)


@pytest.mark.parametrize("num_random", [3, pytest.param(12, marks=pytest.mark.long)])
def test_every_key_of_a_random_objective_acts_or_is_refused_and_no_weight_is_above_the_limit(num_random: int) -> None:
    for config in random_configs(num_random):
        assert inert_changes(config) == [], dataclasses.asdict(config.objective)
        assert largest_weight(config.objective) <= MAX_WEIGHT * (1 + 1e-9), config.objective


def test_the_batch_tells_a_bound_that_never_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof itself can fail: a clip beyond the token mask changes nothing, and only the linter says so."""
    config = Config()
    config.objective.clip_high = 9.0
    monkeypatch.setattr("slipstream.learner.probation.bounds.acts", lambda objective, name, *, without=None: True)
    assert any(change.startswith("clip_high") for change in inert_changes(config))


def inert_changes(config: Config) -> list[str]:
    """Changes of one key that the linter accepts and that change nothing."""
    before = outcome(config.objective)
    with unchecked():  # shapes were checked for `before`
        return [
            f"{name} {getattr(config.objective, name)} -> {value}"
            for name, value in changes(config.objective)
            if torch.equal(outcome(with_value(config, name, value).objective), before)
            and accepted(with_value(config, name, value))
        ]


def changes(objective: ObjectiveConfig) -> Iterator[tuple[str, str | float]]:
    """One key at a time: every other word, and numbers that are smaller and larger, or switched on."""
    for name, words in WORDS.items():
        others = [word for word in words if word != getattr(objective, name)]
        yield from ((name, word) for word in others if computes(objective, name, word))
    for name in NUMBERS:
        value = getattr(objective, name)
        if isinstance(value, bool):
            yield name, not value
            continue
        for changed in [value * 0.7, value * 1.3] if value else [SWITCHED_ON[name]] if name in SWITCHED_ON else []:
            if isinstance(value, int):
                changed = round(changed)
            if valid(objective, name, changed):
                yield name, changed


def computes(objective: ObjectiveConfig, name: str, word: str) -> bool:
    """Whether the code could run it: advantages with a critic need its values, and others have none."""
    if name == "advantage" and (ADVANTAGES[word] == "critic") != (objective.critic != "none"):
        return False
    return valid(objective, name, word)


def valid(objective: ObjectiveConfig, name: str, value: object) -> bool:
    try:
        dataclasses.replace(objective, **{name: value})
    except ConfigError:
        return False
    return True


def with_value(config: Config, name: str, value: object) -> Config:
    changed = copy.copy(config)
    changed.objective = dataclasses.replace(config.objective, **{name: value})
    return changed


def accepted(config: Config) -> bool:
    try:
        check_objective(config)
    except ConfigError:
        return False
    return True


def random_configs(num: int) -> Iterator[Config]:
    """Objectives that the linter accepts, of random words, and of random numbers for some keys."""
    rng = np.random.default_rng(0)
    found = 0
    while found < num:
        words = {name: str(rng.choice(words)) for name, words in WORDS.items()}
        values: dict[str, object] = {name: word for name, word in words.items() if name != "allocation"}
        values["critic"] = "own" if ADVANTAGES[words["advantage"]] == "critic" else "none"
        if words["surrogate"] == "gspo":
            values |= {"clip_low": 3e-4, "clip_high": 4e-4}
        values["dual_clip"] = float(rng.choice([0.0, 3.0, 8.0]))
        values["max_negative_kl"] = float(rng.choice([0.0, 0.1]))
        values["kl_coefficient"] = float(rng.choice([0.0, 0.02]))
        if values["kl_coefficient"] == 0:
            values["kl_place"] = "loss"
        if words["surrogate"] == "cispo":
            values["ratio_high"] = float(rng.choice([2.0, 5.0, 20.0]))
        if words["surrogate"] not in ("ppo_clip", "gspo"):
            values["dual_clip"] = 0.0
        try:
            config = Config(objective=ObjectiveConfig(**values))
        except ConfigError:
            continue
        if accepted(config):
            found += 1
            yield config


@functools.cache
def batch() -> tuple[list[Group], list[dict[str, npt.NDArray[np.float64]]]]:
    """Groups of attempts, those of the first with equal returns; and numbers of each kind for each attempt's tokens.

    The current policy is off from the one that sampled by factors, to one side by little, to one side by much, by next
    to nothing, or by factors that cancel over the attempt.
    """
    rng = np.random.default_rng(1)
    trajectories = [attempt(rng, alike=number < NUM_MEMBERS) for number in range(NUM_GROUPS * NUM_MEMBERS)]
    starts = range(0, len(trajectories), NUM_MEMBERS)
    groups = [group_of(trajectories[start : start + NUM_MEMBERS], group_id=start) for start in starts]
    numbers = []
    for number, trajectory in enumerate(trajectories):
        behaviour = trajectory.behaviour_logprob_array()[trajectory.loss_mask_array()].astype(np.float64)
        noise = rng.normal(size=(3, len(behaviour)))
        off = [
            10 ** rng.uniform(-1, 0.6) * noise[0],
            rng.uniform(-0.2, 0.3) + 0.02 * noise[0],
            rng.uniform(0.5, 2) + 0.02 * noise[0],
            rng.choice([-1, 1]) * 10 ** rng.uniform(-4, -3) + 1e-6 * noise[0],  # as a whole sequence's ratio is clipped
            1.5 * (noise[0] - noise[0].mean()) + rng.uniform(-0.15, 0.01),
        ][number % 5]
        of_policies = {"behaviour": behaviour, "current": behaviour + off, "reference": behaviour + 0.3 * noise[1]}
        numbers.append(of_policies | {"values": noise[2]})
    return groups, numbers


def attempt(rng: np.random.Generator, *, alike: bool) -> Trajectory:
    """One to four turns of four sampled tokens after one of the environment's; the first begin in one state."""
    stride, num_turns = TURN_TOKENS + 1, int(rng.integers(1, 5))
    sampled = [index % stride != 0 for index in range(num_turns * stride)]
    logprobs = np.where(sampled, -rng.uniform(*SURENESS[int(rng.integers(2))], len(sampled)), 0.0)
    rewards = rng.choice([0.0, 0.3, 1.0], num_turns)
    if alike:
        rewards = np.array([1.0, *[0.0] * (num_turns - 1)])
    states = ["start", *(str(rng.integers(2)) for _ in range(num_turns - 1))]
    turns = [
        turn(stride * place + 1, stride * (place + 1), float(reward), state=state)
        for place, (reward, state) in enumerate(zip(rewards, states, strict=True))
    ]
    return recorded(range(len(sampled)), logprobs.tolist(), sampled, turns=turns)


def in_order(kind: str) -> npt.NDArray[np.float64]:
    """The numbers of one kind, attempt after attempt."""
    return np.concatenate([each[kind] for each in batch()[1]])


def as_packed(kind: str) -> Tensor:
    """The same in the order of a pack: longest attempts first."""
    longest_first = sorted(batch()[1], key=lambda each: -len(each[kind]))
    return torch.from_numpy(np.concatenate([each[kind] for each in longest_first]))


@functools.cache
def weighed(*values: object) -> tuple[Packed, int, Tensor]:
    """The batch with its advantages, what its loss is divided by, and which groups are kept."""
    objective = ObjectiveConfig(**dict(zip(OF_WEIGHING, values, strict=True)))
    groups, _ = batch()
    in_reward = objective.kl_coefficient > 0 and objective.kl_place == "reward"
    measured = Measured(
        values=in_order("values") if objective.critic != "none" else None,
        reference_logprobs=in_order("reference") if in_reward else None,
        current_logprobs=in_order("current") if objective.advantage == "vtrace" else None,
    )
    sequences = sequences_with_advantages(groups, objective=objective, measured=measured)
    num_tokens, num_trajectories = count_loss_tokens(sequences), count_trajectories(sequences)
    divisor = loss_divisor(num_loss_tokens=num_tokens, num_trajectories=num_trajectories, objective=objective)
    kept = torch.tensor([float(teaches(group, objective=objective)) for group in groups], dtype=torch.float64)
    return pack(sequences), divisor, kept


def outcome(objective: ObjectiveConfig) -> Tensor:
    """Everything that this objective makes of the batch, as one row of numbers."""
    packed, divisor, kept = weighed(*(getattr(objective, name) for name in OF_WEIGHING))
    in_loss = objective.kl_coefficient > 0 and objective.kl_place == "loss"
    behaviour, current = as_packed("behaviour"), as_packed("current").requires_grad_()
    advantages, entropies = packed.advantages[packed.loss_mask].double(), -current * current.exp()
    others = {"reference_logprobs": as_packed("reference") if in_loss else None, "entropies": entropies}
    tokens = loss_tokens(current, behaviour, advantages, sequences=packed.loss_sequences, **others)
    loss = policy_loss(tokens, objective=objective)
    (gradient,) = torch.autograd.grad(loss.loss_sum / divisor, current)
    returns = torch.zeros(0) if packed.returns is None else packed.returns[packed.loss_mask]
    return torch.cat([gradient, returns.double(), kept, guard_scales(objective)])


def guard_scales(objective: ObjectiveConfig) -> Tensor:
    evidence = [Evidence(weight_mean=mean, token_ess=1.0, trajectory_ess=1.0) for mean in np.linspace(0.2, 5, 97)]
    evidence.append(Evidence(weight_mean=1.0, token_ess=0.05, trajectory_ess=0.5))
    return torch.tensor([decide(each, objective=objective).scale for each in evidence], dtype=torch.float64)


def largest_weight(objective: ObjectiveConfig) -> float:
    """The largest |gradient| / |advantage| over random sequences, whose ratios go from 1e-6 to 1e8."""
    draw = torch.Generator().manual_seed(0)
    sequences = of_lengths(*torch.randint(1, 6, (20_000,), generator=draw).tolist())
    ids = sequences.ids

    def uniform(low: float, high: float, size: int) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=draw, dtype=torch.float64)

    decades = uniform(-6, 8, len(ids))
    near = uniform(-0.5, 1.5, len(ids))  # half of the sequences stay where bounds are
    lagged = math.log(10) * torch.where(ids % 2 == 0, decades, near)
    current = -uniform(0, 6, len(ids))
    largest = 0.0
    for sign in (1.0, -1.0):
        leaf = current.clone().requires_grad_()
        tokens = loss_tokens(leaf, current - lagged, torch.full_like(current, sign), sequences=sequences)
        alone = dataclasses.replace(objective, normalisation="tokens", normalisation_tokens=512, entropy_bonus=0.0)
        (gradient,) = torch.autograd.grad(policy_loss(tokens, objective=alone).loss_sum, leaf)
        largest = max(largest, float(gradient.abs().max()))
    return largest
