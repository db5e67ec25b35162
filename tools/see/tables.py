"""The rows of a report's tables: where time and trajectories went, faults, and settings."""

from collections.abc import Sequence
from statistics import fmean

from slipstream.common.config.config import Config, key_paths, value_of
from slipstream.replay.records.ledger import STATES
from slipstream.tools.see.report_answers import recent
from slipstream.tools.see.run_files import RunFiles
from slipstream.tools.see.summary import counts, ledger_rows, summary_rows

OF_THE_PLACE = ("run.name", "run.root", "redis.url")  # settings that differ between any two runs
MAX_SHOWN_CHARS = 200  # of a setting
# The parts of a step's time that docs/metrics.md explains, the largest first.
PARTS = "wait forward backward optimizer measure reference pack publish archive record checkpoint evaluate"


def times(run: RunFiles) -> dict[str, str]:
    """What the learner does in a step, over the newest quarter of them, and what the actors' episodes wait for."""
    rows, steps = {}, [record for record in recent(run.steps) if "time/wait_s" in record]
    means = (
        {part: fmean(record.get(f"time/{part}_s", 0.0) for record in steps) for part in PARTS.split()} if steps else {}
    )
    if (whole := sum(means.values())) > 0:
        rows["learner, a step"] = f"{whole:.2f} s"
        rows |= {f"learner, {part}": f"{spent / whole:.0%}" for part, spent in means.items() if spent > whole / 200}
    if (spent := run.episode_time) and spent.total_s > 0:
        rows |= {
            "episodes, measured": str(spent.num_episodes),
            "episodes, generation": f"{spent.generate_s / spent.total_s:.0%}",
            "episodes, environment": f"{spent.env_s / spent.total_s:.0%}",
        }
    return rows


def accounts(run: RunFiles) -> dict[str, str]:
    """The summary of a run that has finished, else its newest ledger."""
    if (ledger := run.ledger) is None:
        return {}
    groups = {"opened": ledger.opened, "trained": ledger.trained}
    groups |= {f"dropped: {reason}": count for reason, count in ledger.dropped.items()}
    groups |= {state: getattr(ledger, state) for state in STATES if getattr(ledger, state)}
    rows = summary_rows(run.summary) if run.summary else ledger_rows(ledger)
    source = "summary.json" if run.summary else "the newest checkpoint's tally.json"
    return {f"groups {name}": str(count) for name, count in groups.items()} | rows | {"read from": source}


def faults(run: RunFiles) -> dict[str, str]:
    """What went wrong and was repeated, refused or set aside; zeros too, as they are the news of a good run."""
    rows = {f"log of {kind}": str(count) for kind, count in run.complaints.items()}
    if run.steps:
        rows["optimizer steps skipped"] = str(run.num_refused)
    if (ledger := run.ledger) is None:
        return rows
    return rows | {
        "attempts that failed and were redone": counts(ledger.failed),
        "members redone": str(ledger.redone_members),
        "leases that expired": str(ledger.expired_leases),
        "parts of episodes handed in, and continued": f"{ledger.partials_handed_in}, {ledger.partials_resumed}",
        "inserts that were repeated, and counted once": str(ledger.dedup_hits),
        "inserts of actors that had lost their lease, refused": str(ledger.fenced_inserts),
        "groups quarantined": str(ledger.quarantined),
        "repairs of damaged books": str(ledger.repairs),
    }


def settings(runs: Sequence[RunFiles]) -> tuple[list[list[str]], list[list[str]]]:
    """The settings that differ between the runs, and the others that differ from the defaults."""
    defaults, between, others = Config(), list[list[str]](), list[list[str]]()
    for path in key_paths():
        default, values = value_of(defaults, path), [value_of(run.config, path) for run in runs if run.config]
        if path in OF_THE_PLACE or all(value == default for value in values):
            continue
        shown = [_shown(value_of(run.config, path)) if run.config else "unknown" for run in runs]
        rows = others if all(value == values[0] for value in values) else between
        rows.append([path, _shown(default), *shown])
    return between, others


def _shown(value: object) -> str:
    text = str(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
