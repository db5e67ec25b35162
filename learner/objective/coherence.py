"""The linter of objectives: what would run, and not do what its words say, is refused with the reason and the cure.

Two mistakes of the field cannot be made here and have no rule: the behaviour log-probabilities are always those that
the sampler recorded (no recomputed ones can stand in for them, and none can be missing), and where top-k and top-p cut
the policy off, the learner's softmax runs over what they kept (see `common.kept_sets`).
"""

import dataclasses

from common.config import Config
from common.config_error import ConfigError
from common.objective_config import WITH_CRITIC, ObjectiveConfig

# The largest importance weight that is still a bound: recipes take 1.2 to 10, and 20 beside a trust region.
MAX_WEIGHT = 20.0
# GSPO's ratio is a mean over a whole sequence, so its clips are a few 1e-4; a token's are around 0.2.
MAX_SEQUENCE_CLIP = 0.05
MIN_TOKEN_CLIP = 0.01

# Keys that do something only under some words of another key.
_ONLY_UNDER = {
    "allocation": ("advantage", {"reinforce_pp", "gae", "vtrace"}),
    "gamma": ("advantage", {"reinforce_pp", "gigpo", "gigpo_centred", *WITH_CRITIC}),
    "same_state_weight": ("advantage", {"gigpo", "gigpo_centred"}),
    "gae_lambda": ("advantage", {"gae", "bi_level_gae"}),
    "turn_gamma": ("advantage", {"bi_level_gae"}),
    "turn_lambda": ("advantage", {"bi_level_gae"}),
    "max_rho": ("advantage", {"vtrace"}),
    "max_c": ("advantage", {"vtrace"}),
    "critic_warmup_steps": ("critic", {"own", "shared"}),
    "value_clip": ("critic", {"own", "shared"}),
    "value_coefficient": ("critic", {"shared"}),
    "normalise_returns": ("critic", {"own", "shared"}),
    "allocation_discount": ("allocation", {"discounted"}),
    "clip_low": ("surrogate", {"ppo_clip", "gspo"}),
    "clip_high": ("surrogate", {"ppo_clip", "gspo"}),
    "dual_clip": ("surrogate", {"ppo_clip", "gspo"}),
    "ratio_low": ("surrogate", {"cispo"}),
    "ratio_high": ("surrogate", {"cispo", "aipo", "dppo_tv", "dppo_kl"}),
    "max_total_variation": ("surrogate", {"dppo_tv"}),
    "max_binary_kl": ("surrogate", {"dppo_kl"}),
    "mask_low": ("correction", {"token_mask"}),
    "mask_high": ("correction", {"token_mask"}),
    "sequence_mask_low": ("correction", {"sequence_mask"}),
    "sequence_mask_high": ("correction", {"sequence_mask"}),
    "geometric_mask_low": ("correction", {"geometric_mask"}),
    "geometric_mask_high": ("correction", {"geometric_mask"}),
    "max_behaviour_weight": ("correction", {"truncated_is", "decoupled"}),
    "normalisation_tokens": ("normalisation", {"constant"}),
}


def check_coherence(config: Config) -> None:
    """Raise ConfigError unless the parts of `config.objective` go together, at the lag that `config.replay` allows."""
    objective = config.objective
    _check_critic(objective, config.learner.steps)
    _check_vtrace(objective)
    _check_kl(objective)
    _check_anchor(objective)
    _check_clip(objective)
    if config.replay.max_uses > 1:
        _check_reuse(objective, config.replay.max_uses)
    _check_effect(objective)
    if objective.reward_model and config.replay.keep_fraction < 1:
        raise ConfigError(
            f"`replay.keep_fraction` must be 1 with objective.reward_model, got {config.replay.keep_fraction}: groups "
            "are chosen by what the environment gave, before they are judged; leave it out"
        )
    if config.replay.max_lag > 0:
        _check_bounds(objective, config.replay.max_lag)


def _check_critic(objective: ObjectiveConfig, num_steps: int) -> None:
    if objective.advantage in WITH_CRITIC and objective.critic == "none":
        _refuse("advantage", objective.advantage, "it compares with a critic, and there is none",
                "choose objective.critic own or shared")  # fmt: skip
    if objective.advantage not in WITH_CRITIC and objective.critic != "none":
        _refuse("critic", objective.critic, f"{objective.advantage} never asks it",
                f"choose objective.advantage {' or '.join(WITH_CRITIC)}, or critic none")  # fmt: skip
    if objective.critic_warmup_steps >= num_steps:
        _refuse("critic_warmup_steps", objective.critic_warmup_steps,
                f"learner.steps is {num_steps}, so that the policy would never learn",
                "leave steps to the policy")  # fmt: skip


def _check_vtrace(objective: ObjectiveConfig) -> None:
    vtrace, plain = objective.advantage == "vtrace", objective.surrogate == "policy_gradient"
    if vtrace and not plain:
        _refuse("surrogate", objective.surrogate,
                "vtrace's advantages have the ratio to the behaviour policy in them, and this surrogate would put it "
                "in twice", "choose surrogate policy_gradient")  # fmt: skip
    if plain and not vtrace:
        _refuse("surrogate", objective.surrogate,
                f"it has no ratio to the behaviour policy, and {objective.advantage} brings none: nothing would bound "
                "a stale token", "choose advantage vtrace, or surrogate ppo_clip")  # fmt: skip


def _check_kl(objective: ObjectiveConfig) -> None:
    in_reward = objective.kl_place == "reward"
    if objective.kl_coefficient == 0 and (in_reward or objective.reference_every):
        name = "kl_place" if in_reward else "reference_every"
        _refuse(name, getattr(objective, name), "it has no effect with objective.kl_coefficient 0",
                "leave it out, or give the divergence a weight")  # fmt: skip
    if objective.kl_estimator == "k1" and not in_reward:
        _refuse("kl_estimator", "k1", "its gradient is zero on average, so that in the loss it does nothing but add "
                "noise", "use k2 or k3, or objective.kl_place=reward")  # fmt: skip
    if objective.kl_coefficient and in_reward and objective.kl_estimator != "k1":
        _refuse("kl_estimator", objective.kl_estimator,
                "in the reward it is the value that counts, and only that of k1 gives the divergence's gradient",
                "use k1, or objective.kl_place=loss")  # fmt: skip


def _check_reuse(objective: ObjectiveConfig, max_uses: int) -> None:
    clips = objective.surrogate in ("ppo_clip", "gspo", "dppo_tv", "dppo_kl")
    bounded = clips or objective.correction.endswith("_mask")
    if objective.correction == "truncated_is" or (objective.correction != "decoupled" and not bounded):
        _refuse(
            "surrogate, objective.correction",
            (objective.surrogate, objective.correction),
            f"replay.max_uses is {max_uses}, and their weights are cut but never 0: each use of a group pushes its "
            "tokens further, and nothing says when it is enough",
            "choose ppo_clip without truncated_is, a mask, or replay.max_uses=1",
        )


def _check_anchor(objective: ObjectiveConfig) -> None:
    weighed = objective.correction in ("truncated_is", "decoupled")
    if weighed and objective.surrogate in ("aipo", "dppo_tv", "dppo_kl", "policy_gradient"):
        _refuse(
            "correction",
            objective.correction,
            f"{objective.surrogate} has itself a ratio to the behaviour policy, which this correction takes out of the "
            "surrogate and makes a weight",
            "use none or a mask, or surrogate ppo_clip or cispo",
        )


def _check_clip(objective: ObjectiveConfig) -> None:
    clips = (objective.clip_low, objective.clip_high)
    if objective.surrogate == "gspo" and max(clips) > MAX_SEQUENCE_CLIP:
        _refuse(
            "clip_low, objective.clip_high",
            clips,
            "gspo's ratio is the mean over a sequence and never gets that far from 1: nothing would be clipped",
            "3e-4 and 4e-4 are the paper's",
        )
    if objective.surrogate == "ppo_clip" and min(clips) < MIN_TOKEN_CLIP:
        _refuse(
            "clip_low, objective.clip_high",
            clips,
            "the ratio of a single token scatters further than that: nearly every token would be clipped",
            "0.2 and 0.28 are usual, or choose surrogate gspo",
        )


def _check_effect(objective: ObjectiveConfig) -> None:
    for item in dataclasses.fields(objective):
        value = getattr(objective, item.name)
        word_key, words = _ONLY_UNDER.get(item.name, ("", set()))
        if words and value != item.default and getattr(objective, word_key) not in words:
            _refuse(
                item.name,
                value,
                f"it has no effect with objective.{word_key} {getattr(objective, word_key)}",
                f"leave it out, or choose {' or '.join(sorted(words))}",
            )


def _check_bounds(objective: ObjectiveConfig, max_lag: int) -> None:
    bounds = {
        "clip_high": 1 + objective.clip_high if objective.surrogate in ("ppo_clip", "gspo") else 1.0,
        "ratio_high": objective.ratio_high if objective.surrogate not in ("ppo_clip", "gspo") else 1.0,
        "max_rho": objective.max_rho,
        "max_behaviour_weight": (
            objective.max_behaviour_weight if objective.correction in ("truncated_is", "decoupled") else 1.0
        ),
    }
    for name, bound in bounds.items():
        if not bound <= MAX_WEIGHT:
            _refuse(
                name,
                getattr(objective, name),
                f"a ratio up to {bound:g} is as good as unclipped, and unclipped importance sampling collapses under "
                f"lag (replay.max_lag is {max_lag})",
                f"keep it at {MAX_WEIGHT:g} at most, or train with replay.target_lag=0 and replay.max_lag=0",
            )


def _refuse(name: str, value: object, reason: str, cure: str) -> None:
    raise ConfigError(f"`objective.{name}` {value!r} is incoherent: {reason}; {cure}")
