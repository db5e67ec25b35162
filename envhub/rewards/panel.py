"""Several judges of the same episode or group: their marks become one, and how far they agree is recorded beside it."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slipstream.common.config.env_config import LABEL
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.rewards.chat_client import Reading
from slipstream.envhub.rewards.episode import Episode, Marked
from slipstream.envhub.rewards.judge import Judge, versions_of
from slipstream.envhub.rewards.part import measure_of
from slipstream.envhub.together import together

MAX_JUDGES = 8


def majority(marks: Sequence[float]) -> float:
    """1 if more than half of the judges give at least 0.5, 0 if fewer do, 0.5 if it is half of them."""
    share = sum(mark >= 0.5 for mark in marks) / len(marks)
    return 0.5 if share == 0.5 else float(share > 0.5)


COMBINE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": majority,
}


def combined(marks: Mapping[str, float], combine: str, versions: Mapping[str, float]) -> Marked:
    """Return one mark of those of two judges or more. Beside it are these, their `versions` and their agreement.

    The agreement is 1 - the mean difference of two marks.
    """
    differences = [abs(one - other) for one, other in itertools.combinations(marks.values(), 2)]
    agreement = 1 - statistics.fmean(differences)
    return Marked(value=COMBINE[combine](list(marks.values())), beside={**marks, "agreement": agreement, **versions})


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Marks an episode by several judges."""

    judges: Mapping[str, Judge]
    combine: str  # one of COMBINE

    async def __call__(self, episode: Episode) -> Marked:
        """Return the mark of all judges. Raises EnvError if one of them gives none within its deadline."""
        found: list[Reading[float]] = await together(judge.mark(episode) for judge in self.judges.values())
        readings = dict(zip(self.judges, found, strict=True))
        marks = {name: each.value for name, each in readings.items()}
        return combined(marks, self.combine, versions_of(readings))


def panel(key: str, *, judges: Any, combine: str = "mean") -> Panel:
    """Make a panel from the settings of the part `key`. Raises ConfigError if one is malformed."""
    is_panel = isinstance(judges, Mapping) and 2 <= len(judges) <= MAX_JUDGES
    if not is_panel or not all(
        isinstance(each, Mapping) and LABEL.fullmatch(str(name)) for name, each in judges.items()
    ):
        raise ConfigError(
            f"`{key}.judges` must map 2 to {MAX_JUDGES} names to the settings of a judge, got {judges!r}; for example "
            "{strict: {url: ..., model: ..., rubric: ...}, mild: {...}}"
        )
    if str(combine) not in COMBINE:
        raise ConfigError(f"`{key}.combine` must be {', '.join(COMBINE)}, got {combine!r}; mean is the default")
    if "agreement" in judges:
        raise ConfigError(f"`{key}.judges`: agreement is the name of what is recorded beside them; choose another")
    made = {}
    for name, settings in judges.items():
        options = {str(option): value for option, value in settings.items()}
        made[str(name)] = cast(Judge, measure_of(f"{key}.judges.{name}", "judge", options))
    return Panel(judges=made, combine=combine)
