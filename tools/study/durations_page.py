"""Writes the results of the study of durations: as JSON, and as tables in its page."""

from pathlib import Path

import msgspec

from common.run_dir import write_whole
from tools.study.page import BEGIN, END, markdown, with_table

OLD_RULE = "groups"  # a group is dropped for its oldest token
NEW_RULE = "tokens"  # a token is masked for its own lag, a group dropped for its newest token
QUICK = 0.2  # units of virtual time per step in the tables of rules
PATIENT = 0.5  # the same in the table of the learner's wait


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one cell; only sampled tokens are counted."""

    rule: str
    max_lag: int
    target_lag: int
    long: float
    step_units: float
    opened_long: float  # share of long groups among opened groups
    trained_long: float  # share of long groups among trained groups
    trained_long_tokens: float  # share of long groups' tokens among trained groups' tokens
    taught_long_tokens: float  # the same among the tokens that were not masked
    dropped_long: float  # share of dropped groups among long groups that were trained or dropped
    masked: float  # share of trained groups' tokens that were masked
    masked_long: float  # the same for long groups
    wasted: float  # share of all sampled tokens that were in dropped groups, or masked
    learner_idle: float  # share of the time that the learner waited
    steps_per_unit: float  # of virtual time
    lag: dict[str, float]  # share of trained groups' tokens by bucket of lag


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command of a study, and its results."""

    command: str
    date: str
    results: list[Result]

    def of(self, *, step_units: float) -> list[Result]:
        return [result for result in self.results if result.step_units == step_units]


def write(study: Study, folder: Path) -> None:
    """Write durations.json into `folder`, and the tables into durations.md there, between its two marks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "durations.json", msgspec.json.format(msgspec.json.encode(study), indent=1).decode() + "\n")
    page = folder / "durations.md"
    write_whole(page, with_table(page.read_text() if page.exists() else BEGIN + END + "\n", tables(study)))


def tables(study: Study) -> str:
    """In Markdown, one table of rules per `target_lag`, and one table of the learner's wait."""
    quick, found = study.of(step_units=QUICK), []
    for target_lag in dict.fromkeys(result.target_lag for result in quick):
        rows = [_by_rule(result) for result in quick if result.target_lag == target_lag]
        found.append(f"`target_lag` {target_lag}, a step of {QUICK:g} units:\n\n{markdown(RULE_COLUMNS, rows)}")
    rows = [_by_wait(result) for result in study.of(step_units=PATIENT)]
    found.append(f"Lag by token, `max_lag` 16, a step of {PATIENT:g} units:\n\n{markdown(WAIT_COLUMNS, rows)}")
    return "\n".join([*found, f"`{study.command}`, {study.date}.\n"])


RULE_COLUMNS = (
    "long tasks take",
    "lag is counted by",
    "max_lag",
    "long of opened groups",
    "of trained groups",
    "of trained tokens that are not masked",
    "long groups dropped",
    "tokens masked",
    "of long tasks",
    "tokens wasted",
    "learner waits",
    "lag of tokens: to 4 / 8 / 16 / 32 / more",
)
WAIT_COLUMNS = (
    "long tasks take",
    "target_lag",
    "learner waits",
    "steps a unit",
    "tokens masked",
    "of long tasks",
    "lag of tokens: to 4 / 8 / 16 / 32 / more",
)


def _by_rule(result: Result) -> list[str]:
    return [
        f"{result.long:g} x",
        result.rule,
        str(result.max_lag),
        _percent(result.opened_long),
        _percent(result.trained_long),
        _percent(result.taught_long_tokens),
        _percent(result.dropped_long),
        _percent(result.masked),
        _percent(result.masked_long),
        _percent(result.wasted),
        _percent(result.learner_idle),
        _lags(result),
    ]


def _by_wait(result: Result) -> list[str]:
    return [
        f"{result.long:g} x",
        str(result.target_lag),
        _percent(result.learner_idle),
        f"{result.steps_per_unit:.2f}",
        _percent(result.masked),
        _percent(result.masked_long),
        _lags(result),
    ]


def _lags(result: Result) -> str:
    up_to_4 = sum(result.lag[bucket] for bucket in ("0", "1", "2", "3_4"))
    rest = [result.lag[bucket] for bucket in ("5_8", "9_16", "17_32", "33_up")]
    return " / ".join(_percent(share).removesuffix(" %") for share in [up_to_4, *rest])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
