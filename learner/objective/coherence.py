"""The linter of objectives: rejects settings that would have no effect or not do what they say, with a remedy.

Two common mistakes are impossible here and need no rule. Behaviour log-probabilities are always those that the sampler
recorded, never recomputed or missing. And with top-k or top-p, the learner's softmax runs over the tokens that they
kept (see `slipstream.common.records.kept_sets`). Checks that need the loss are in
`slipstream.learner.probation.bounds`; this file works without torch.
"""

import dataclasses

from slipstream.common.config.config import Config
from slipstream.common.config.objective_config import ADVANTAGES, ObjectiveConfig
from slipstream.common.process.config_error import ConfigError, require

# GSPO's ratio is a mean over a whole sequence, so usual clips are a few 1e-4; for single tokens they are around 0.2.
MAX_SEQUENCE_CLIP = 0.05
MIN_TOKEN_CLIP = 0.01
COLLAPSING_LAG, VTRACE_COLLAPSING_LAG = 8, 16  # optimizer steps; smaller ones were not tried without max_negative_kl
REFUSED = 2  # exit code of `python -m slipstream.learner.probation.bounds`

_SIBLINGS, _STATES, _CRITIC = (
    [name for name, compares in ADVANTAGES.items() if compares == what] for what in ("siblings", "states", "critic")
)

# Keys that have an effect only with some values of another key.
_ONLY_WITH = {
    "allocation": ("advantage", {"reinforce_pp", "gae", "vtrace", *_SIBLINGS}),
    "gamma": ("advantage", {"reinforce_pp", *_STATES, *_CRITIC}),
    "gae_lambda": ("advantage", {"gae", "bi_level_gae"}),
    "turn_gamma": ("advantage", {"bi_level_gae"}),
    "critic_warmup_steps": ("critic", {"own", "shared"}),
    "clip_low": ("surrogate", {"ppo_clip", "gspo"}),
    "clip_high": ("surrogate", {"ppo_clip", "gspo"}),
    "dual_clip": ("surrogate", {"ppo_clip", "gspo"}),
    "ratio_high": ("surrogate", {"cispo", "dppo_tv"}),
    "max_total_variation": ("surrogate", {"dppo_tv"}),
    "mask_low": ("correction", {"token_mask"}),
    "mask_high": ("correction", {"token_mask"}),
    "normalisation_tokens": ("normalisation", {"constant"}),
}


def check_coherence(config: Config) -> None:
    """Raise ConfigError unless the keys of `config.objective` fit together, at the lag that `config.replay` allows."""
    objective = config.objective
    _check_critic(objective, config.learner.steps)
    _check_vtrace(objective, config.replay.max_lag)
    _check_kl(objective)
    _check_teacher(objective)
    _check_teacher_url(config)
    _check_clip(objective)
    if config.replay.max_uses > 1:
        _check_reuse(objective, config.replay.max_uses)
    _check_effect(objective)
    _check_kept(config)
    _check_trees(config)
    if config.replay.max_lag > 0:
        _check_negatives(objective, config.replay.max_lag)


def _check_critic(objective: ObjectiveConfig, num_steps: int) -> None:
    if objective.compares == "critic" and objective.critic == "none":
        objective.refuse(
            "advantage", "it needs a critic, and objective.critic is `none`", "choose objective.critic own or shared"
        )
    if objective.compares != "critic" and objective.critic != "none":
        objective.refuse(
            "critic",
            f"objective.advantage {objective.advantage} does not use a critic",
            f"choose objective.advantage {' or '.join(_CRITIC)}, or critic none",
        )
    if objective.critic_warmup_steps >= num_steps:
        objective.refuse(
            "critic_warmup_steps",
            f"learner.steps is {num_steps}, so the policy would never learn",
            "take fewer warm-up steps than learner.steps",
        )


def _check_kept(config: Config) -> None:
    """Refuse to keep groups by the spread of their returns where that is not known, or always 0."""
    kept = config.replay.keep_fraction
    if kept == 1:
        return
    if config.objective.reward_model:
        raise ConfigError(
            f"`replay.keep_fraction` must be 1 with objective.reward_model, got {kept}: it chooses by the rewards of "
            "the environment, before the reward model scores them; leave it out"
        )
    if config.objective.compares == "teacher":
        raise ConfigError(
            f"`replay.keep_fraction` must be 1 with objective.advantage distillation, got {kept}: it chooses by the "
            "spread of rewards, from which distillation learns nothing; leave it out"
        )
    if config.replay.group_size == 1:
        raise ConfigError(
            f"`replay.keep_fraction` must be 1 with replay.group_size 1, got {kept}: it chooses by the spread of a "
            "group's returns, which is always 0 for one return; leave it out, or use groups of 2 or more"
        )


def _check_trees(config: Config) -> None:
    """Attempts that share tokens need the advantage that counts these once, and it needs such attempts."""
    objective, replay = config.objective, config.replay
    if objective.compares == "forks" and not replay.trees:
        objective.refuse(
            "advantage",
            "replay.trees is empty, so no attempt forks from another, and it is leave_one_out",
            "set replay.trees to random:2 or more, or choose leave_one_out",
        )
    if objective.compares != "forks" and replay.trees:
        raise ConfigError(
            f"`replay.trees` must be empty with objective.advantage {objective.advantage}, got {replay.trees!r}: it "
            "would train the tokens that attempts share once for each of them, and compare them with themselves; "
            "choose objective.advantage tree, or leave it out"
        )
    if replay.trees and objective.normalisation == "sequences":
        objective.refuse(
            "normalisation",
            "with replay.trees a fork trains only its own tokens, and each of these would weigh the more, the "
            "later the fork begins",
            "choose tokens or constant",
        )


def _check_vtrace(objective: ObjectiveConfig, max_lag: int) -> None:
    vtrace, plain = objective.advantage == "vtrace", objective.surrogate == "policy_gradient"
    if vtrace and not plain:
        objective.refuse(
            "surrogate",
            "vtrace's advantages already contain the ratio to the behaviour policy, and this surrogate would apply "
            "it a second time",
            "choose surrogate policy_gradient",
        )
    if plain and not vtrace and max_lag > 0 and "correction" not in objective.own_parts:
        objective.refuse(
            "surrogate",
            f"neither it nor advantage {objective.advantage} has a ratio to the behaviour policy: nothing would "
            f"correct a stale token (replay.max_lag is {max_lag})",
            "choose advantage vtrace, surrogate ppo_clip, or replay.target_lag=0 and replay.max_lag=0",
        )


def _check_kl(objective: ObjectiveConfig) -> None:
    in_reward = objective.kl_place == "reward"
    if objective.kl_coefficient == 0 and (in_reward or objective.reference_model):
        name = "kl_place" if in_reward else "reference_model"
        objective.refuse(
            name, "it has no effect with objective.kl_coefficient 0", "leave it out, or set kl_coefficient above 0"
        )


def _check_teacher(objective: ObjectiveConfig) -> None:
    if objective.compares != "teacher":
        return
    if not objective.reference_model or objective.kl_place != "reward" or not objective.kl_coefficient:
        objective.refuse(
            "advantage",
            "its advantages are the divergence from a teacher alone",
            "set objective.reference_model to the teacher's folder, kl_place=reward and kl_coefficient=1",
        )
    if objective.reward_model:
        objective.refuse("reward_model", "distillation learns from no reward", "leave it out")


def _check_teacher_url(config: Config) -> None:
    """A server gives log-probabilities of its whole distribution, at temperature 1, before the step."""
    objective, sampling = config.objective, config.sampling
    if not objective.teacher_url:
        return
    if objective.kl_place != "reward":
        objective.refuse("kl_place", "a teacher behind a URL is asked before the step", "choose reward")
    for key, value, only in (
        ("sampling.temperature", sampling.temperature, 1),
        ("sampling.top_p", sampling.top_p, 1),
        ("sampling.top_k", sampling.top_k, 0),
        ("sampling.max_thought_tokens", sampling.max_thought_tokens, 0),  # a server knows no mark that was not sampled
    ):
        require(
            value == only,
            key,
            f"{only} with a URL as `objective.reference_model`",
            value,
            f"a server gives log-probabilities of the whole distribution; set it to {only}, or use a folder",
        )


def _check_reuse(objective: ObjectiveConfig, max_uses: int) -> None:
    clips = objective.surrogate in ("ppo_clip", "gspo", "dppo_tv")
    # What parts of the user's do is measured in slipstream.learner.probation.own_parts.
    bounded = clips or objective.has_own_loss or objective.correction == "token_mask"
    if not bounded:
        objective.refuse(
            "surrogate, correction",
            f"replay.max_uses is {max_uses}, and token weights are capped but never 0: each use of a group pushes its "
            "tokens further, without limit",
            "choose ppo_clip, token_mask, or replay.max_uses=1",
        )


def _check_clip(objective: ObjectiveConfig) -> None:
    clips = (objective.clip_low, objective.clip_high)
    if objective.surrogate == "gspo" and max(clips) > MAX_SEQUENCE_CLIP:
        objective.refuse(
            "clip_low, clip_high",
            "gspo's ratio is a mean over a sequence and never gets that far from 1: nothing would be clipped",
            "the paper uses 3e-4 and 4e-4",
        )
    if objective.surrogate == "ppo_clip" and min(clips) < MIN_TOKEN_CLIP:
        objective.refuse(
            "clip_low, clip_high",
            "the ratio of a single token varies more than that: nearly every token would be clipped",
            "0.2 and 0.28 are usual, or choose surrogate gspo",
        )


def _check_effect(objective: ObjectiveConfig) -> None:
    for item in dataclasses.fields(objective):
        value = getattr(objective, item.name)
        other_key, allowed = _ONLY_WITH.get(item.name, ("", set()))
        if allowed and value != item.default and getattr(objective, other_key) not in allowed:
            objective.refuse(
                item.name,
                f"it has no effect with objective.{other_key} {getattr(objective, other_key)}",
                f"leave it out, or choose {' or '.join(sorted(allowed))}",
            )
    if objective.reward_model and objective.reward_model_weight == 0:
        objective.refuse(
            "reward_model_weight", "the reward model would have no effect", "leave objective.reward_model out"
        )


def _check_negatives(objective: ObjectiveConfig, max_lag: int) -> None:
    """Refuse what keeps the gradient of far-off tokens that did badly, at a large lag without max_negative_kl."""
    for name, chosen, lag in (
        ("cispo", objective.surrogate, COLLAPSING_LAG),
        ("vtrace", objective.advantage, VTRACE_COLLAPSING_LAG),
    ):
        if chosen == name and objective.max_negative_kl == 0 and max_lag >= lag:
            objective.refuse(
                "max_negative_kl",
                f"{name} clips no gradient, and such runs collapsed at a lag of {lag} (docs/studies/lag.md); "
                f"replay.max_lag is {max_lag}",
                "use 0.1, with which they did not collapse",
            )


def reads(objective: ObjectiveConfig, name: str) -> bool:
    """Whether the chosen objective uses `objective.<name>` at all."""
    other_key, allowed = _ONLY_WITH.get(name, ("correction", {objective.correction}))
    return getattr(objective, other_key) in allowed
