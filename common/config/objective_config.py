"""The section `objective`: the parts of the loss by name, and their numbers."""

import math
from dataclasses import dataclass

from slipstream.common.process.config_error import require
from slipstream.common.process.imported import is_own

# What each advantage compares an attempt, or its tokens, with; a function of the user's compares siblings.
ADVANTAGES = {
    "group_standardised": "siblings",
    "group_centred": "siblings",
    "leave_one_out": "siblings",
    "gigpo": "states",  # siblings, and turns that began in the same state
    "gigpo_centred": "states",
    "tree": "forks",  # siblings where they leave each other
    "reinforce_pp": "batch",
    "distillation": "teacher",
    "gae": "critic",
    "bi_level_gae": "critic",
    "vtrace": "critic",
}
OWN = ("advantage", "surrogate", "correction")  # the parts that may also be `module:function` of the user's


@dataclass(kw_only=True, slots=True)
class ObjectiveConfig:
    advantage: str = "group_standardised"  # or group_centred, leave_one_out, gigpo, tree, gae, module:function, ...
    allocation: str = "last_token"  # which token gets a reward: last_token of the episode, or per_turn the turn's last
    gamma: float = 1.0  # discount of a reward: gigpo for each turn before it, others for each sampled token before it
    same_state_weight: float = 1.0  # gigpo: weight of the comparison of turns that began in one state; 0 is GRPO
    gae_lambda: float = 1.0  # gae, bi_level_gae: 1 uses only the rewards, 0 only the critic's next value
    turn_gamma: float = 1.0  # bi_level_gae: discount of a reward for each turn before it
    turn_lambda: float = 1.0  # bi_level_gae: like gae_lambda, between turns
    max_rho: float = 1.0  # vtrace: upper limit of a token's own ratio
    critic: str = "none"  # none, own (a model of its own), shared (a value head on the policy's model)
    critic_warmup_steps: int = 0  # steps at the start in which only the critic learns
    value_coefficient: float = 0.5  # shared: weight of the critic's loss relative to the policy's
    surrogate: str = "ppo_clip"  # or gspo, cispo, dppo_tv, policy_gradient, module:function
    clip_low: float = 0.2  # ppo_clip, gspo: the ratio's lower clip is 1 - clip_low
    clip_high: float = 0.28  # ppo_clip, gspo: the ratio's upper clip is 1 + clip_high
    dual_clip: float = 0.0  # ppo_clip, gspo: the ratio's upper clip for negative advantages; 0 is off
    ratio_low: float = 0.0  # cispo: lowest weight of a token
    ratio_high: float = 5.0  # cispo, dppo_tv: highest weight of a token
    max_total_variation: float = 0.2  # dppo_tv: the most that a token's probability may have changed
    correction: str = "token_mask"  # or none, truncated_is, decoupled, module:function
    mask_low: float = 0.5  # token_mask: tokens of a lower ratio are left out
    mask_high: float = 5.0  # token_mask: tokens of a higher ratio are left out
    max_behaviour_weight: float = 2.0  # truncated_is clips the importance weight here, decoupled omits tokens above
    proximal_decay: float = 0.9  # truncated_is, decoupled: decay of the average of weights that is the proximal policy
    max_negative_kl: float = 0.1  # nats per token: sequences further from behaviour train no negatives; 0 is off
    kl_coefficient: float = 0.0  # weight of the divergence from the reference policy; 0 is off
    kl_place: str = "loss"  # where the divergence counts: in the loss, or in the reward of every sampled token
    reference_model: str = ""  # another model as the reference, a teacher: a folder, or the URL of a vLLM server
    reference_every: int = 0  # steps after which the learner's policy becomes the reference; 0 keeps the first one
    reward_model: str = ""  # a folder of `slipstream reward`; its score is added to the last turn of an episode
    reward_model_weight: float = 1.0  # factor of that score
    entropy_bonus: float = 0.0  # weight of the entropy, which is subtracted from the loss; 0 is off
    normalisation: str = "tokens"  # the loss is a mean over tokens, sequences (trajectories), or constant
    normalisation_tokens: int = 512  # constant: the length with which every trajectory counts
    guard_min_ess: float = 0.3  # a step with an effective sample size below this fraction is shrunk; 0 is off
    guard_max_ratio: float = 2.0  # a step with a mean ratio above this, or below its inverse, is skipped; 0 is off

    @property
    def compares(self) -> str:
        """What the advantage compares with: see `ADVANTAGES`."""
        return ADVANTAGES.get(self.advantage, "siblings")

    @property
    def compares_siblings(self) -> bool:
        """Whether attempts are compared only with attempts at the same task: then equal returns teach nothing."""
        return self.compares in ("siblings", "states", "forks")

    @property
    def own_parts(self) -> dict[str, str]:
        """The parts that are functions of the user's, as `module:function`, by key."""
        return {name: getattr(self, name) for name in OWN if is_own(getattr(self, name))}

    @property
    def has_own_loss(self) -> bool:
        """Whether the surrogate or the correction is the user's."""
        return is_own(self.surrogate) or is_own(self.correction)

    @property
    def has_proximal(self) -> bool:
        """Whether the surrogate needs a proximal policy, for which an average of the weights is kept."""
        return self.correction in ("truncated_is", "decoupled")

    @property
    def teacher_url(self) -> str:
        """The address of the teacher's server; empty if the reference is no server's."""
        return self.reference_model if self.reference_model.startswith(("http://", "https://")) else ""

    @property
    def returns_come_later(self) -> bool:
        """Whether the returns are incomplete when a group is claimed, because a reward model scores it later.

        A divergence in the reward is also measured later, but does not count here: a group with equal returns teaches
        nothing about its task.
        """
        return bool(self.reward_model)

    def __post_init__(self) -> None:
        self._check_words()
        self._check_surrogate()
        self._check_estimates()
        self._check_loss_and_guard()

    def _check_words(self) -> None:
        for name, words in (
            ("advantage", tuple(ADVANTAGES)),
            ("critic", ("none", "own", "shared")),
            ("allocation", ("last_token", "per_turn")),
            ("surrogate", ("ppo_clip", "gspo", "cispo", "dppo_tv", "policy_gradient")),
            ("correction", ("none", "token_mask", "truncated_is", "decoupled")),
            ("kl_place", ("loss", "reward")),
            ("normalisation", ("tokens", "sequences", "constant")),
        ):
            word = getattr(self, name)
            known = [*words, "module:function"] if name in OWN else [*words]
            contract = f"{', '.join(known[:-1])} or {known[-1]}"
            require(
                word in words or name in self.own_parts, f"objective.{name}", contract, word, f"try {words[0]} first"
            )

    def _check_surrogate(self) -> None:
        require(0 < self.clip_low < 1, "objective.clip_low", "in (0, 1)", self.clip_low, "0.2 is usual")
        require(self.clip_high > 0, "objective.clip_high", "> 0", self.clip_high, "0.28 is usual")
        require(
            self.dual_clip == 0 or self.dual_clip > 1 + self.clip_high,
            "objective.dual_clip",
            f"0, or > 1 + objective.clip_high = {1 + self.clip_high:g}",
            self.dual_clip,
            "3 is usual",
        )
        require(
            0 <= self.mask_low < 1 < self.mask_high,
            "objective.mask_low, objective.mask_high",
            "below and above 1",
            (self.mask_low, self.mask_high),
            "0.5 and 5 are usual",
        )
        require(
            0 <= self.ratio_low <= 1 < self.ratio_high,
            "objective.ratio_low, objective.ratio_high",
            "in [0, 1] and > 1",
            (self.ratio_low, self.ratio_high),
            "0 and 5 are usual",
        )
        require(
            self.max_behaviour_weight >= 1,
            "objective.max_behaviour_weight",
            ">= 1",
            self.max_behaviour_weight,
            "2 is usual",
        )
        require(
            0 < self.proximal_decay < 1,
            "objective.proximal_decay",
            "in (0, 1)",
            self.proximal_decay,
            "0.9 is the default; with 0 it is the current policy, and clips have no effect",
        )

    def _check_estimates(self) -> None:
        for name in ("gamma", "turn_gamma"):
            value = getattr(self, name)
            require(0 < value <= 1, f"objective.{name}", "in (0, 1]", value, "1 does not discount")
        for name in ("gae_lambda", "turn_lambda"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"objective.{name}", "in [0, 1]", value, "0.95 to 1 are usual")
        require(self.max_rho >= 1, "objective.max_rho", ">= 1", self.max_rho, "1 is usual")

    def _check_loss_and_guard(self) -> None:
        for name in ("critic_warmup_steps", "reference_every"):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name}", ">= 0", value, "0 is off")
        require(
            self.normalisation_tokens >= 1,
            "objective.normalisation_tokens",
            ">= 1",
            self.normalisation_tokens,
            "use the largest length of an episode",
        )
        require(
            self.max_total_variation > 0,
            "objective.max_total_variation",
            "> 0",
            self.max_total_variation,
            "0.2 is usual",
        )
        require(
            0 < self.value_coefficient < math.inf,
            "objective.value_coefficient",
            "> 0",
            self.value_coefficient,
            "0.5 is usual",
        )
        for name in ("max_negative_kl", "kl_coefficient", "entropy_bonus", "same_state_weight"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"objective.{name}", ">= 0", value, "0 is off")
        require(
            not self.reward_model.startswith(("http://", "https://")),
            "objective.reward_model",
            "a folder",
            self.reward_model,
            "a model that `slipstream serve-rewards` serves is a part of env.rewards: {part: reward_model, url: ...}",
        )
        require(
            math.isfinite(self.reward_model_weight),
            "objective.reward_model_weight",
            "a number",
            self.reward_model_weight,
            "1 is the default",
        )
        require(
            self.reward_model != "" or self.reward_model_weight == 1,
            "objective.reward_model_weight",
            "1 without objective.reward_model",
            self.reward_model_weight,
            "leave it out",
        )
        require(
            0 <= self.guard_min_ess < 1,
            "objective.guard_min_ess",
            "in [0, 1)",
            self.guard_min_ess,
            "0.3 is the default, 0 is off",
        )
        require(
            self.guard_max_ratio == 0 or self.guard_max_ratio > 1,
            "objective.guard_max_ratio",
            "0 or > 1",
            self.guard_max_ratio,
            "2 is the default, 0 is off",
        )
