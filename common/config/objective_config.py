"""The section `objective`: the parts of the loss by name, and their numbers."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NoReturn

from slipstream.common.config.setting_bounds import (
    Count,
    Finite,
    InnerShare,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    Whole,
    check_bounds,
)
from slipstream.common.config.suggestion import VALUES
from slipstream.common.process.config_error import ConfigError, require
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
    allocation: Literal["last_token", "per_turn"] = "last_token"  # which token gets a reward: episode's or turn's
    gamma: PositiveShare = 1.0  # discount of a reward for each sampled token before it; gigpo: for each turn
    gae_lambda: Share = 1.0  # gae, bi_level_gae: 1 uses only the rewards, 0 only the critic's next value
    turn_gamma: PositiveShare = 1.0  # bi_level_gae: discount of a reward for each turn before it
    critic: Literal["none", "own", "shared"] = "none"  # shared: a value head on the policy's model
    critic_warmup_steps: Whole = 0  # steps at the start in which only the critic learns
    surrogate: str = "ppo_clip"  # or gspo, cispo, dppo_tv, policy_gradient, module:function
    clip_low: InnerShare = 0.2  # ppo_clip, gspo: the ratio's lower clip is 1 - clip_low
    clip_high: Positive = 0.28  # ppo_clip, gspo: the ratio's upper clip is 1 + clip_high
    dual_clip: float = 0.0  # ppo_clip, gspo: the ratio's upper clip for negative advantages; 0 is off
    ratio_high: float = 5.0  # cispo, dppo_tv: highest weight of a token
    max_total_variation: Positive = 0.2  # dppo_tv: the most that a token's probability may have changed
    correction: str = "token_mask"  # or none, module:function
    mask_low: float = 0.5  # token_mask: tokens of a lower ratio are left out
    mask_high: float = 5.0  # token_mask: tokens of a higher ratio are left out
    max_negative_kl: NonNegative = 0.1  # nats per token: sequences further from behaviour train no negatives; 0 is off
    kl_coefficient: NonNegative = 0.0  # weight of the divergence from the reference policy; 0 is off
    kl_place: Literal["loss", "reward"] = "loss"  # where the divergence counts; reward: of every sampled token
    reference_model: str = ""  # another model as the reference, a teacher: a folder, or the URL of a vLLM server
    reward_model: str = ""  # a folder of `slipstream fit reward`; its score is added to the last turn of an episode
    reward_model_weight: Finite = 1.0  # factor of that score
    entropy_bonus: NonNegative = 0.0  # weight of the entropy, which is subtracted from the loss; 0 is off
    normalisation: Literal["tokens", "sequences", "constant"] = "tokens"  # what the loss is a mean over
    normalisation_tokens: Count = 512  # constant: the length with which every trajectory counts
    guard: bool = True  # shrink a step with a small effective sample size, and skip one with a mean ratio far from 1

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

    def refuse(self, names: str, reason: str, cure: str) -> NoReturn:
        """Raise ConfigError for values that do not fit together: of the keys `names`, with commas between them."""
        keys = names.split(", ")
        listed = ", ".join(f"objective.{key}" for key in keys)
        raise ConfigError(f"`{listed}` {attrgetter(*keys)(self)!r} is incoherent: {reason}; {cure}")

    def __post_init__(self) -> None:
        check_bounds(self, "objective.")
        self._check_words()
        self._check_surrogate()
        self._check_reward_model()

    def _check_words(self) -> None:
        for name, words in (
            ("advantage", tuple(ADVANTAGES)),
            ("surrogate", ("ppo_clip", "gspo", "cispo", "dppo_tv", "policy_gradient")),
            ("correction", ("none", "token_mask")),
        ):
            word = getattr(self, name)
            contract = f"{', '.join(words)} or module:function"
            key, is_known = f"objective.{name}", word in words or name in self.own_parts
            require(is_known, key, contract, word, f"try {VALUES[key].get(word.lower(), words[0])} first")

    def _check_surrogate(self) -> None:
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
        require(self.ratio_high > 1, "objective.ratio_high", "> 1", self.ratio_high, "5 is usual")

    def _check_reward_model(self) -> None:
        require(
            not self.reward_model.startswith(("http://", "https://")),
            "objective.reward_model",
            "a folder",
            self.reward_model,
            "a model that `slipstream serve rewards` serves is a part of env.rewards: {part: reward_model, url: ...}",
        )
        require(
            self.reward_model != "" or self.reward_model_weight == 1,
            "objective.reward_model_weight",
            "1 without objective.reward_model",
            self.reward_model_weight,
            "leave it out",
        )
