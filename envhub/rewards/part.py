"""The parts of a reward, as `env.rewards` names them, and the reward that they compose.

The reward of an episode is the sum of its parts, each with its weight. Parts are computed once an episode has ended. A
number for the whole episode is the reward of its last turn.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from slipstream.common.config.env_config import LABEL, MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import is_own, loaded
from slipstream.common.records.trajectory import MAX_REWARD, MAX_REWARDS
from slipstream.envhub.env import EnvError
from slipstream.envhub.env_options import is_number
from slipstream.envhub.rewards.episode import Episode, Reading, Values
from slipstream.envhub.rewards.measures import MEASURES, Measure

if TYPE_CHECKING:
    from slipstream.envhub.rewards.chat_client import OwnPolicy
    from slipstream.envhub.rewards.judge import Judge
    from slipstream.envhub.rewards.reward_client import RewardClient

# Measures that ask others. Each is imported when the first of its kind is made.
ASKING = {
    "judge": "slipstream.envhub.rewards.judge:judge",
    "reward_model": "slipstream.envhub.rewards.reward_client:reward_model",
}
CONDITIONS: dict[str, Callable[[Episode], bool]] = {
    "always": lambda episode: True,
    "success": lambda episode: episode.success,
    "failure": lambda episode: not episode.success,
    "goal": lambda episode: episode.goal > 0,
}
_KEYS = ("part", "weight", "min", "max", "only_if", "success_from")  # all others are options of the measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a reward."""

    key: str  # env.rewards.NAME
    name: str
    kind: str  # a built-in measure, or `module:function`
    measure: Measure
    compare: str | None  # how the judges compare a whole group; None: the measure is of one episode
    component: str | None  # of `goal`: the environment's own reward that it replaces, "" for all; else None
    weight: float
    low: float
    high: float
    only_if: str
    success_from: float | None  # the episode's score is this part's value, and from here on it is a success

    async def values(self, episode: Episode, *, timeout_s: float) -> Values:
        """Return what the part measures, within its limits; None if it does not apply to this episode.

        Raises EnvError, ValueError, or what a function of the user's raises, if it fails; EnvError too if it has no
        deadline of its own and takes over `timeout_s`.
        """
        if self.compare or not CONDITIONS[self.only_if](episode):
            return None
        try:
            async with asyncio.timeout(None if self.kind in ASKING else timeout_s) as limit:
                found = await self.measure(episode)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EnvError(f"no answer within `env.step_timeout_s` = {timeout_s:g} s") from error
        if isinstance(found, list):
            return [self.limited(value) for value in found]
        if isinstance(found, Reading):
            return replace(found, value=self.limited(found.value))
        return None if found is None else self.limited(found)

    def scored(self, episode: Episode, found: Values) -> Episode:
        """Return `episode` with what this part measured as its score. Raises EnvError if it measured nothing."""
        assert self.success_from is not None
        if found is None:
            raise EnvError(f"`{self.key}`: it gives no value, and with success_from each episode needs a score")
        total = math.fsum(_of_turns(found, num_turns=len(episode.turns)))
        return replace(episode, score=min(max(total, 0.0), 1.0), success=total >= self.success_from)

    def limited(self, value: float) -> float:
        """Return `value` within `min` and `max`. Raises EnvError if its weight makes it too large for a reward."""
        value = min(max(value, self.low), self.high)
        if not abs(value * self.weight) <= MAX_REWARD:
            raise EnvError(f"{value:g} with weight {self.weight:g} is beyond {MAX_REWARD:g}; set min and max")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """The reward of an episode."""

    rewards: list[dict[str, float]]  # of each turn, by component
    values: dict[str, float]  # of each part that applied, without its weight; the sum over turns
    score: float
    success: bool


def reward_parts(envs: Mapping[str, MixtureEntry]) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each environment of a run. Raises ConfigError, with the key, if one is malformed."""
    alone = len(envs) == 1 and next(iter(envs.values())).name in envs
    return {
        label: parts_of("env.rewards" if alone else f"env.mixture.{label}.rewards", entry.rewards)
        for label, entry in envs.items()
    }


def group_parts(parts: Iterable[Part]) -> list[tuple[Part, Judge]]:
    """Return the parts that compare whole groups, each with its judge. Those are computed when a group is complete."""
    return [(part, cast("Judge", part.measure)) for part in parts if part.compare]


def judged_envs(envs: Mapping[str, MixtureEntry]) -> set[str]:
    """Return the environments whose groups a judge marks as a whole before they are ready."""
    return {label for label, parts in reward_parts(envs).items() if group_parts(parts)}


def actors_judge(parts: Iterable[Sequence[Part]]) -> bool:
    """Whether the actors of a run judge all its groups, as the run's own policy is one of the judges.

    Otherwise `slipstream serve judge` does, which has no engine.
    """
    return any(own_judge(part) for of_env in parts for part, _ in group_parts(of_env))


def judge_of(part: Part) -> Judge | None:
    """Return the judge that marks episodes or groups for `part`; None for another measure."""
    return cast("Judge", part.measure) if part.kind == "judge" else None


def own_judge(part: Part) -> Judge | None:
    """Return the judge of `part` if it is the run's own policy."""
    judge = judge_of(part)
    return judge if judge and judge.is_own else None


def check_keys(parts: Mapping[str, Sequence[Part]], *, of_groups: bool = False) -> None:
    """Raise ConfigError unless this host has the key of every judge of episodes, or of groups, that needs one."""
    for part in (part for of_env in parts.values() for part in of_env):
        judge = judge_of(part)
        if judge and bool(part.compare) == of_groups:
            try:
                judge.client.read_key()
            except ValueError as error:
                raise ConfigError(f"`{part.key}`: {error}") from None


def judge_by(policy: OwnPolicy, parts: Mapping[str, Sequence[Part]]) -> None:
    """Let `policy` answer for every judge whose url is `actors`."""
    for part in (part for of_env in parts.values() for part in of_env):
        if judge := own_judge(part):
            judge.client.own_policy = policy


def read_as(root: str, parts: Mapping[str, Sequence[Part]]) -> None:
    """Let every served reward model compare its tokenizer with the policy's: see `slipstream.common.text.tokenizer`."""
    for part in (part for of_env in parts.values() for part in of_env):
        if part.kind == "reward_model":
            cast("RewardClient", part.measure).reads = root


def book_on(account: Callable[[str, int, int, float], tuple[int, int, float]], parts: Iterable[Sequence[Part]]) -> None:
    """Let each judge's budget be one of the run: `account` adds to what its key has spent, and returns the sums."""
    for part in (part for of_env in parts for part in of_env):
        if judge := judge_of(part):
            judge.client.account = partial(account, part.key)


def shown_columns(part: Part) -> Sequence[str]:
    """Return the columns of a task that the judge of `part` sees."""
    judge = judge_of(part)
    return judge.columns if judge else ()


def parts_of(key: str, rewards: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts that `key` lists. Raises ConfigError, with the key, if one is malformed."""
    parts = tuple(_part(f"{key}.{name}", str(name), settings) for name, settings in rewards.items())
    scoring = [part.name for part in parts if part.success_from is not None]
    if len(scoring) > 1:
        raise ConfigError(f"`{key}`: only one part can have success_from, got {' and '.join(scoring)}; remove others")
    versions = {f"{part.name}_policy_version" for part in parts if own_judge(part)}
    if twice := [part.name for part in parts if part.name in versions]:
        raise ConfigError(f"`{key}.{twice[0]}`: a judge records its version under this name; choose another name")
    goals = [part.component for part in parts if part.component is not None]
    if len(goals) != len(set(goals)) or ("" in goals and len(goals) > 1):
        raise ConfigError(f"`{key}`: two parts of kind goal replace the same reward; remove one")
    return parts


def _part(key: str, name: str, settings: Any) -> Part:
    if LABEL.fullmatch(name) is None:
        raise ConfigError(f"`{key}`: a name has letters, digits and '_', at most 32; it becomes a part of metric names")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"`{key}` must be a mapping, such as {{part: length, weight: -0.1}}, got {settings!r}")
    kind = settings.get("part", name)
    options = {str(option): value for option, value in settings.items() if option not in _KEYS}
    compare = options.pop("compare", None) if kind == "judge" else None
    if compare not in (None, "listwise"):
        raise ConfigError(f"`{key}.compare` must be listwise, got {compare!r}; leave it out for one mark")
    if compare is not None and settings.keys() & {"only_if", "success_from"}:
        raise ConfigError(f"`{key}`: a judge that compares a whole group has no only_if or success_from; remove them")
    low, high = _number(key, settings, "min", -math.inf), _number(key, settings, "max", math.inf)
    only_if, success_from = settings.get("only_if", "always"), settings.get("success_from")
    if low > high:
        raise ConfigError(f"`{key}.min` must be at most max = {high:g}, got {low:g}; swap them")
    if str(only_if) not in CONDITIONS:  # a list has no hash
        raise ConfigError(f"`{key}.only_if` must be {', '.join(CONDITIONS)}, got {only_if!r}; change it")
    if success_from is not None:
        if not 0 < _number(key, settings, "success_from", 1.0) <= 1:
            raise ConfigError(f"`{key}.success_from` must be above 0, at most 1, got {success_from!r}; 1 is usual")
        if only_if != "always":
            raise ConfigError(f"`{key}.only_if` must be always with success_from: each episode needs a score")
    return Part(
        key=key,
        name=name,
        kind=kind,
        measure=_measure(key, kind, options),
        compare=compare,
        component=options.get("component", "") if kind == "goal" else None,
        weight=_number(key, settings, "weight", 1.0),
        low=low,
        high=high,
        only_if=only_if,
        success_from=None if success_from is None else float(success_from),
    )


def _measure(key: str, kind: Any, options: Mapping[str, Any]) -> Measure:
    if isinstance(kind, str) and is_own(kind):
        if options:
            raise ConfigError(f"`{key}` has unknown keys {', '.join(options)}; a function takes no options")
        return cast("Measure", loaded("slipstream.envhub.rewards.function:function_measure")(f"{key}.part", kind))
    known = [*MEASURES, *ASKING]
    if str(kind) not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "set `part`, or give the part the name of one"
        raise ConfigError(f"`{key}`: a part is {', '.join(known)}, or module:function, got {kind!r}; {hint}")
    make: Callable[..., Measure] = MEASURES[kind] if kind in MEASURES else loaded(ASKING[kind])
    make = partial(make, key) if kind == "judge" else make
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        keys = ", ".join([*_KEYS, *signature.parameters, *(["compare"] if kind == "judge" else [])])
        raise ConfigError(f"`{key}`: {error}; the keys of a {kind} are {keys}") from None
    try:
        return make(**options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"`{key}`: {error}") from None


def _number(key: str, settings: Mapping[str, Any], name: str, default: float) -> float:
    if name not in settings:
        return default
    value = settings[name]
    if not is_number(value):
        raise ConfigError(f"`{key}.{name}` must be a finite number, got {value!r:.100}; leave it out for the default")
    return float(value)


def composed(episode: Episode, parts: Sequence[Part], values: Sequence[Values]) -> Composed:
    """Return the reward of `episode` from what its parts measured, in the order of `parts`.

    Rewards of the environment that no `goal` names stay as they are. Raises EnvError if a name is used twice, or if
    the part that is the score measured nothing.
    """
    replaced = {part.component for part in parts if part.component is not None}
    rewards = [
        {} if "" in replaced else {name: reward for name, reward in turn.rewards.items() if name not in replaced}
        for turn in episode.turns
    ]
    taken = {name for turn in rewards for name in turn}
    measured: dict[str, float] = {}
    for part, found in zip(parts, values, strict=True):
        if part.name in taken:
            raise EnvError(f"`{part.key}`: the environment has a reward of this name; choose another name")
        of_turns = _of_turns(found, num_turns=len(rewards))
        for turn, value in zip(rewards, of_turns, strict=True):
            turn[part.name] = part.weight * value
        if found is not None:
            measured[part.name] = math.fsum(of_turns)
        if isinstance(found, Reading):
            measured |= found.version_under(part.name)
        if part.success_from is not None:
            episode = part.scored(episode, found)
    if len(rewards[-1]) > MAX_REWARDS:
        raise EnvError(f"a turn has {len(rewards[-1])} rewards, the limit is {MAX_REWARDS}; use fewer parts")
    return Composed(rewards=rewards, values=measured, score=episode.score, success=episode.success)


def _of_turns(values: Values, *, num_turns: int) -> list[float]:
    if isinstance(values, list):
        return values
    value = values.value if isinstance(values, Reading) else values or 0.0
    return [0.0] * (num_turns - 1) + [value]
