"""Writes the results of the study of durations: as JSON, and as tables in its page."""

from pathlib import Path

import msgspec

from slipstream.common.process.run_dir import write_whole
from slipstream.tools.lab.study.page import BEGIN, END, markdown, with_table

OLD_RULE = "groups"  # a group is dropped for its oldest token
NEW_RULE = "tokens"  # a token is masked for its own lag, a group dropped for its newest token
QUICK = 0.2  # units of virtual time per step in the tables of rules
PATIENT = 0.5  # the same in the table of the learner's wait
CAPS = (4, 8, 16)  # the values of `max_lag` in the table of rules
ROOMY = 16  # `max_lag` in the table of the learner's wait


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
    """In Markdown, a table of the rules and one of the learner's wait; the JSON file has all numbers."""
    return (
        f"A step of {QUICK:g} units:\n\n{markdown(RULE_COLUMNS, _by_rule(study.of(step_units=QUICK)))}\n"
        f"How long the learner waits / tokens masked, by tokens, with `max_lag` {ROOMY} and a step of {PATIENT:g} "
        f"units:\n\n{_by_wait(study.of(step_units=PATIENT))}\n"
        f"[All numbers](durations.json). `{study.command}`, {study.date}.\n"
    )


RULE_COLUMNS = (
    "`target_lag`",
    "long tasks take",
    "by groups, `max_lag` 4: long groups dropped",
    "tokens wasted",
    "long of trained groups",
    "by tokens: long of trained groups",
    "learner waits",
    f"tokens masked with `max_lag` {' / '.join(map(str, CAPS))}",
)


def _by_rule(results: list[Result]) -> list[list[str]]:
    """One row per `target_lag` and duration of long tasks; a cell without its measurement is empty."""
    rows = []
    for target_lag, long in dict.fromkeys((result.target_lag, result.long) for result in results):
        own = [result for result in results if (result.target_lag, result.long) == (target_lag, long)]
        old = next((result for result in own if result.rule == OLD_RULE), None)
        new = {result.max_lag: result for result in own if result.rule == NEW_RULE}
        by_groups = [_percent(old.dropped_long), _percent(old.wasted), _percent(old.trained_long)] if old else [""] * 3
        first = next(iter(new.values()), None)  # what is trained, and when, does not depend on the cap
        by_tokens = [_percent(first.trained_long), _percent(first.learner_idle)] if first else [""] * 2
        masked = " / ".join(_percent(new[cap].masked) for cap in CAPS if cap in new)
        rows.append([str(target_lag), f"{long:g} x", *by_groups, *by_tokens, masked])
    return rows


def _by_wait(results: list[Result]) -> str:
    """A row per `target_lag`, a column per duration of long tasks."""
    cells = {(result.target_lag, result.long): result for result in results}
    longs = dict.fromkeys(result.long for result in results)
    rows = [
        [str(target_lag), *(_wait(cells.get((target_lag, long))) for long in longs)]
        for target_lag in dict.fromkeys(result.target_lag for result in results)
    ]
    return markdown(["`target_lag`", *(f"long tasks take {long:g} x" for long in longs)], rows)


def _wait(result: Result | None) -> str:
    return f"{_percent(result.learner_idle)} / {_percent(result.masked)}" if result else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
