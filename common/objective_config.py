"""The objective's section of the configuration: each part by name, and the numbers that it takes."""

import math
from dataclasses import dataclass

from common.config_error import require

# Parts of the objective that are known by name and cannot be had: why, and what to do instead.
NOT_YET = {
    "tree_sibling": "it compares siblings in a tree, and trajectories do not branch into trees; use group_standardised",
}

GROUP_RELATIVE = ("group_standardised", "group_centred", "leave_one_out")  # advantages that compare siblings
WITH_CRITIC = ("gae", "bi_level_gae", "vtrace")  # advantages that need values


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    advantage: str = "group_standardised"  # or group_centred, leave_one_out, gigpo, reinforce_pp, gae, vtrace, ...
    allocation: str = "last_token"  # of rewards to tokens: last_token, uniform_positive, discounted, per_turn
    allocation_discount: float = 0.95  # discounted: what a turn's part of the return is of the next turn's
    gamma: float = 1.0  # discount of a reward: gigpo for each turn before it, all others for each sampled token
    same_state_weight: float = 1.0  # gigpo: weight of how turns that began in the same state compare; 0 leaves GRPO
    gae_lambda: float = 1.0  # gae, bi_level_gae: 1 trusts the rewards alone, 0 the critic's next value alone
    turn_gamma: float = 1.0  # bi_level_gae: discount of a reward for each turn before it
    turn_lambda: float = 1.0  # bi_level_gae: as gae_lambda, from turn to turn
    max_rho: float = 1.0  # vtrace: the cap of a token's own ratio
    max_c: float = 1.0  # vtrace: the cap of the ratios that carry later tokens back
    critic: str = "none"  # none, own (a trunk of its own), shared (a value head on the policy's)
    critic_warmup_steps: int = 0  # steps at the start in which only the critic learns
    value_clip: float = 0.2  # how far a value may move in a step, in standard deviations of returns; 0 is off
    value_coefficient: float = 0.5  # shared: weight of the critic's loss beside the policy's
    normalise_returns: bool = True  # the critic predicts returns less their running mean, in standard deviations
    surrogate: str = "ppo_clip"  # or gspo, cispo, aipo, dppo_tv, dppo_kl, policy_gradient: see learner.surrogate
    clip_low: float = 0.2  # ppo_clip, gspo: the ratio's lower clip is 1 - clip_low
    clip_high: float = 0.28  # ppo_clip, gspo: the ratio's upper clip is 1 + clip_high
    dual_clip: float = 0.0  # ppo_clip, gspo: the ratio's upper clip where the advantage is negative; 0 is off
    ratio_low: float = 0.0  # cispo: a token weighs at least this ratio
    ratio_high: float = 5.0  # cispo, aipo, dppo: a token weighs at most this ratio
    max_total_variation: float = 0.2  # dppo_tv: how far a token's probability may have moved
    max_binary_kl: float = 0.05  # dppo_kl: nats, how far a token's probability may have moved
    correction: str = "token_mask"  # none, token_mask, sequence_mask, geometric_mask, truncated_is, decoupled
    mask_low: float = 0.5  # token_mask drops tokens whose ratio is below
    mask_high: float = 5.0  # token_mask drops tokens whose ratio is above
    sequence_mask_low: float = 0.5  # sequence_mask drops sequences whose product of ratios is below
    sequence_mask_high: float = 2.0  # sequence_mask drops sequences whose product of ratios is above
    geometric_mask_low: float = 0.99  # geometric_mask drops sequences whose mean ratio is below
    geometric_mask_high: float = 1.01  # geometric_mask drops sequences whose mean ratio is above
    max_behaviour_weight: float = 2.0  # truncated_is cuts the importance weight here, decoupled drops tokens above
    max_negative_kl: float = 0.1  # nats a token: sequences further from behaviour do not train negatives; 0 is off
    kl_coefficient: float = 0.0  # weight of the divergence from the policy that RL began with; 0 is off
    kl_estimator: str = "k3"  # of that divergence: k1, k2, k3; k1 in the reward only
    kl_place: str = "loss"  # where the divergence is counted: loss, or reward (of every sampled token)
    reference_every: int = 0  # steps after which that policy is replaced by the learner's; 0 keeps it frozen
    reward_model: str = ""  # a folder of `slipstream reward`: its score is a reward of each episode's last turn
    reward_model_weight: float = 1.0  # what is earned for each unit of that score
    entropy_bonus: float = 0.0  # weight of the entropy that is subtracted from the loss; 0 is off
    normalisation: str = "tokens"  # the loss is a mean over: tokens, sequences, constant (sequences of equal length)
    normalisation_tokens: int = 512  # constant: the length that every sequence counts as
    guard_min_ess: float = 0.3  # an effective sample size below this fraction shrinks the step; 0 is off
    guard_max_ratio: float = 2.0  # a mean ratio above this, or below its inverse, skips the step; 0 is off

    @property
    def compares_siblings(self) -> bool:
        """Whether attempts at one task are compared with each other alone: then equal ones teach nothing."""
        return self.advantage not in ("reinforce_pp", *WITH_CRITIC)

    @property
    def returns_come_later(self) -> bool:
        """Whether what attempts earned is not known whole when they are claimed: a score or a divergence is missing."""
        return bool(self.reward_model) or (self.kl_coefficient > 0 and self.kl_place == "reward")

    def __post_init__(self) -> None:
        for name, words in (
            ("advantage", (*GROUP_RELATIVE, "gigpo", "gigpo_centred", "reinforce_pp", *WITH_CRITIC)),
            ("critic", ("none", "own", "shared")),
            ("allocation", ("last_token", "uniform_positive", "discounted", "per_turn")),
            ("surrogate", ("ppo_clip", "gspo", "cispo", "aipo", "dppo_tv", "dppo_kl", "policy_gradient")),
            ("correction", ("none", "token_mask", "sequence_mask", "geometric_mask", "truncated_is", "decoupled")),
            ("kl_estimator", ("k3", "k2", "k1")),
            ("kl_place", ("loss", "reward")),
            ("normalisation", ("tokens", "sequences", "constant")),
        ):
            word = getattr(self, name)
            cure = NOT_YET.get(word, f"{words[0]} is the first to try")
            contract = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            require(word in words, f"objective.{name}", contract, word, cure)
        require(0 < self.clip_low < 1, "objective.clip_low", "in (0, 1)", self.clip_low, "0.2 is usual")
        require(self.clip_high > 0, "objective.clip_high", "> 0", self.clip_high, "0.28 is usual")
        require(self.dual_clip == 0 or self.dual_clip > 1 + self.clip_high, "objective.dual_clip",
                 f"0, or > 1 + objective.clip_high = {1 + self.clip_high:g}", self.dual_clip, "3 is usual")  # fmt: skip
        for name, usual in (("mask", "0.5 and 5"), ("sequence_mask", "0.5 and 2"), ("geometric_mask", "0.99 and 1.01")):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            require(0 <= low < 1 < high, f"objective.{name}_low, objective.{name}_high", "below and above 1",
                     (low, high), f"{usual} are usual")  # fmt: skip
        require(0 <= self.ratio_low <= 1 < self.ratio_high, "objective.ratio_low, objective.ratio_high",
                 "in [0, 1] and > 1", (self.ratio_low, self.ratio_high), "0 and 5 are usual")  # fmt: skip
        require(self.max_behaviour_weight >= 1, "objective.max_behaviour_weight", ">= 1", self.max_behaviour_weight,
                 "2 is usual")  # fmt: skip
        for name in ("gamma", "turn_gamma", "allocation_discount"):
            value = getattr(self, name)
            require(0 < value <= 1, f"objective.{name}", "in (0, 1]", value, "1 does not discount")
        for name in ("gae_lambda", "turn_lambda"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"objective.{name}", "in [0, 1]", value, "0.95 to 1 are usual")
        require(self.max_rho >= self.max_c > 0, "objective.max_rho, objective.max_c", "> 0, max_rho the larger",
                 (self.max_rho, self.max_c), "1 and 1 are usual")  # fmt: skip
        for name in ("critic_warmup_steps", "reference_every"):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name}", ">= 0", value, "0 is off")
        require(self.normalisation_tokens >= 1, "objective.normalisation_tokens", ">= 1", self.normalisation_tokens,
                 "take the longest that an episode may become")  # fmt: skip
        for name, usual in (("max_total_variation", "0.2 is usual"), ("max_binary_kl", "0.05 is usual")):
            value = getattr(self, name)
            require(value > 0, f"objective.{name}", "> 0", value, usual)
        require(0 < self.value_coefficient < math.inf, "objective.value_coefficient", "> 0", self.value_coefficient,
                 "0.5 is usual")  # fmt: skip
        for name in ("max_negative_kl", "kl_coefficient", "entropy_bonus", "value_clip", "same_state_weight"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"objective.{name}", ">= 0", value, "0 is off")
        require(math.isfinite(self.reward_model_weight), "objective.reward_model_weight", "a number",
                 self.reward_model_weight, "1 is the default")  # fmt: skip
        require(self.reward_model != "" or self.reward_model_weight == 1, "objective.reward_model_weight",
                 "1 without a reward_model", self.reward_model_weight, "there is no score to count")  # fmt: skip
        require(0 <= self.guard_min_ess < 1, "objective.guard_min_ess", "in [0, 1)", self.guard_min_ess,
                 "0.3 is the default, 0 is off")  # fmt: skip
        require(self.guard_max_ratio == 0 or self.guard_max_ratio > 1, "objective.guard_max_ratio", "0 or > 1",
                 self.guard_max_ratio, "2 is the default, 0 is off")  # fmt: skip
