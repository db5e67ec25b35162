"""The environments that a run learns in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Ge

from slipstream.common.config.setting_bounds import Count, Positive, check_bounds
from slipstream.common.process.config_error import require

TOOLS = "tools"  # the action format in which actions are calls of tools
LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")  # it becomes a part of metric names


@dataclass(kw_only=True, slots=True)
class MixtureEntry:
    """One environment of a mixture."""

    name: str = ""  # as `env.name`; empty means the label of the entry
    options: dict[str, Any] = field(default_factory=dict)  # as `env.options`
    rewards: dict[str, Any] = field(default_factory=dict)  # as `env.rewards`
    weight: float = 1.0  # its share of the groups is this weight, divided by the sum of all weights


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    name: str = "shop"  # a key in envhub/catalogue.py, or `module:Class`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the environment's class
    rewards: dict[str, Any] = field(default_factory=dict)  # parts of the reward beside the environment's own, by name
    mixture: dict[str, MixtureEntry] = field(default_factory=dict)  # several: {LABEL: {name, options, rewards, weight}}
    curriculum: bool = False  # environments of the mixture that are too hard or too easy for now get less weight
    max_turns: Count = 12  # of an episode; to reach it is an outcome that the policy is responsible for
    action_format: str = "plain"  # plain, action_tag, react, outcome, tools, a name in env.formats, or `module:Class`
    formats: dict[str, Any] = field(default_factory=dict)  # your own: {NAME: {instructions, write, pattern}}
    show_admissible: bool = False  # every observation ends with the list of the actions that are possible in it
    step_timeout_s: Positive = 30.0  # a reset or step that takes longer is an env failure
    episode_timeout_s: Positive = 600.0  # an episode that takes longer is stopped and played again
    num_train_tasks: Annotated[int | None, Ge(1)] = None  # once each before any twice; None: a file's rows, or 100,000

    def __post_init__(self) -> None:
        check_bounds(self, "env.")
        require(
            not (self.rewards and self.mixture),
            "env.rewards",
            "empty with env.mixture",
            self.rewards,
            "every environment of a mixture has its own parts: env.mixture.LABEL.rewards",
        )
        for key, value, default in (("name", self.name, "shop"), ("options", self.options, {})):
            require(
                not self.mixture or value == default,
                f"env.{key}",
                f"left out with env.mixture ({', '.join(self.mixture)})",
                value,
                f"each environment of it has its own, env.mixture.LABEL.{key}; env.mixture={{}} removes them all",
            )
        self._check_mixture()

    def _check_mixture(self) -> None:
        """Raise ConfigError for an entry that cannot be."""
        for label, entry in self.mixture.items():
            require(
                LABEL.fullmatch(label) is not None,
                "env.mixture",
                "names of letters, digits and '_'",
                label,
                "choose another label; it becomes a part of metric names",
            )
            require(
                0 < entry.weight < float("inf"),
                f"env.mixture.{label}.weight",
                "> 0",
                entry.weight,
                "remove the entry to leave its environment out",
            )

    def comparisons(self) -> list[str]:
        """The keys of the parts whose judges compare whole groups, such as `env.rewards.NAME`."""
        parts_of = {f"env.mixture.{label}.rewards": entry.rewards for label, entry in self.mixture.items()}
        return [
            f"{key}.{name}"
            for key, parts in ({"env.rewards": self.rewards} | parts_of).items()
            for name, part in parts.items()
            if isinstance(part, Mapping) and part.get("compare") is not None
        ]

    def entries(self) -> dict[str, MixtureEntry]:
        """The environments by `Task.env`: those of the mixture, or the only one."""
        if not self.mixture:
            return {self.name: MixtureEntry(name=self.name, options=self.options, rewards=self.rewards)}
        return {label: replace(entry, name=entry.name or label) for label, entry in self.mixture.items()}
