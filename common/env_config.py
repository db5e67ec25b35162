"""Which environments a run learns in."""

import re
from dataclasses import dataclass, field
from typing import Any

from common.config_error import require

LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")  # it becomes a part of metrics' names


@dataclass(kw_only=True, slots=True)
class PartConfig:
    """One environment of a mixture."""

    name: str = ""  # as `env.name`; empty: what the part is called
    options: dict[str, Any] = field(default_factory=dict)  # as `env.options`
    weight: float = 1.0  # its share of the groups is this by the weights of all


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    name: str = "shop"  # a key in envhub/catalogue.py, or `module:Class`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment's class
    mixture: dict[str, PartConfig] = field(default_factory=dict)  # several instead: {LABEL: {name, options, weight}}
    min_success: float = 0.0  # a part of the mixture that succeeds more rarely is too hard for now
    max_success: float = 1.0  # a part of the mixture that succeeds more often is too easy by now
    aside_weight: float = 0.1  # what the weight of a part that is too hard or too easy is multiplied by
    max_turns: int = 12  # the task's allowance; running out is the policy's own outcome
    action_format: str = "plain"  # a key of common.action_format.FORMATS: how an action is written
    step_timeout_s: float = 30.0  # a reset or step that takes longer is an env failure
    episode_timeout_s: float = 600.0  # an episode that takes longer is cut and redone
    num_train_tasks: int = 100_000  # train tasks, visited in a seeded order without repeats until all are seen

    def __post_init__(self) -> None:
        require(self.max_turns >= 1, "env.max_turns", ">= 1", self.max_turns, "an episode has at least one turn")
        for name in ("step_timeout_s", "episode_timeout_s"):
            value = getattr(self, name)
            require(value > 0, f"env.{name}", "> 0", value, "leave it out for the default")
        require(self.num_train_tasks >= 1, "env.num_train_tasks", ">= 1", self.num_train_tasks, "100000 is the default")
        for label, part in self.mixture.items():
            require(LABEL.fullmatch(label) is not None, "env.mixture", "names of letters, digits and '_'", label,
                    "choose another; it becomes a part of metrics' names")  # fmt: skip
            require(0 < part.weight < float("inf"), f"env.mixture.{label}.weight", "> 0", part.weight,
                    "leave the part out to have none of it")  # fmt: skip
        require(0 <= self.min_success < self.max_success <= 1, "env.min_success, env.max_success",
                "0 <= min < max <= 1", (self.min_success, self.max_success), "0.1 and 0.9 are usual")  # fmt: skip
        require(0 < self.aside_weight <= 1, "env.aside_weight", "above 0, at most 1", self.aside_weight,
                "a part without any tasks would never be seen to change")  # fmt: skip

    def parts(self) -> dict[str, PartConfig]:
        """The environments by what `Task.env` calls them: those of the mixture, else the only one."""
        if not self.mixture:
            return {self.name: PartConfig(name=self.name, options=self.options)}
        return {
            label: PartConfig(name=part.name or label, options=part.options, weight=part.weight)
            for label, part in self.mixture.items()
        }
