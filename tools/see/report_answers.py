"""The questions that a reader of a report asks first, each answered in one line."""

import math
import time
from collections.abc import Sequence
from statistics import fmean

from slipstream.common.config.config import Config
from slipstream.common.process.headline import headline, held_out_success, interval
from slipstream.common.process.run_state import Standing
from slipstream.replay.fleet.fleet import RunState
from slipstream.replay.records.ledger import ledger_of
from slipstream.replay.run.diagnosis import Diagnosis, Facts, diagnose_records
from slipstream.replay.run.equal_returns import Outlook, outlook
from slipstream.tools.see.metrics_window import NUM_EXACT, Record
from slipstream.tools.see.run_files import RunFiles

NEWEST = 10  # steps, over which the present state is judged; of a long run, which side waits in its last quarter
LATEST_S = 4e9  # Unix time; a later one is damage
COMPARED = 400  # episodes at either end of a run: enough to know the success rate to within 0.05
UNKNOWN = "not recorded"


def newest(steps: Sequence[Record], name: str) -> float | None:
    """The mean of a metric over the newest steps that have it; None if no step has it."""
    values = [record[name] for record in steps if name in record][-NEWEST:]
    return fmean(values) if values else None


def _state(run: RunFiles) -> str:
    if not run.steps:
        return f"{run.state.value}; no step of RL was made"
    last, wanted = run.steps[-1], f" of {run.config.learner.steps}" if run.config else ""
    lasted = f" in {run.summary.wall_s:.0f} s" if run.summary and run.state is Standing.FINISHED else ""
    is_known = 0 < last.get("time", 0) < LATEST_S
    at = time.strftime(", the last at %Y-%m-%d %H:%M", time.localtime(last["time"])) if is_known else ""
    return f"{last['step']:.0f}{wanted} steps, {run.state.value}{lasted}{at}"


def _learning(run: RunFiles) -> str:
    """Compares the oldest and the newest episodes."""
    until = run.config.last_full_step if run.config else math.inf
    counted = [record for record in run.steps if {"produced/success", "produced/reward"} <= record.keys()]
    counted = [record for record in counted if record.get("step", 0) <= until] or counted
    half = len(counted) // 2
    before, after = (headline(part, wanted=COMPARED) for part in (counted[:half][::-1], counted[half:]))
    if after is None or before is None:
        return "too few episodes have finished"
    is_solved = outlook(success=after.success, mean_return=after.reward) is Outlook.SOLVED
    verdict = "the tasks are solved" if is_solved else "no clear change"
    if after.low > before.high:
        verdict = "yes"
    elif after.high < before.low:
        verdict = "NO, it unlearns"
    first, last = (f"{interval(part.success, part.num_episodes)} of the" for part in (before, after))
    return f"{verdict}: success {first} first {before.num_episodes} episodes, {last} last {after.num_episodes}"


def _held_out(run: RunFiles) -> str:
    """The evaluation of the policy that RL began with, after a warm start, and the newest one."""
    if not (shown := run.evaluations):
        return "not evaluated"
    first = [record for record in shown if record["step"] == shown[0]["step"]][-1]
    compared = [first] if shown[-1] is first else [first, shown[-1]]
    texts = [f"{held_out_success(record)} at step {record['step']:.0f}" for record in compared]
    return f"{', then '.join(texts)}, of {shown[-1]['eval/num_tasks']:.0f} tasks"


def _stale(run: RunFiles) -> str:
    mean, most = newest(run.steps, "lag/mean"), newest(run.steps, "lag/max")
    if mean is None or most is None:
        return UNKNOWN
    size = newest(run.steps, "mismatch/effective_sample_size")
    limits = f" (target {run.config.replay.target_lag}, limit {run.config.replay.max_lag})" if run.config else ""
    effective = f"; effective sample size {size:.2f}" if size is not None else ""
    return f"lag {mean:.1f} steps, {most:.1f} at most{limits}{effective}"


def recorded_diagnosis(run: RunFiles) -> Diagnosis | None:
    """The state of a run by its newest recorded steps, whether or not its processes are alive; None without a step."""
    steps = recent([record for record in run.steps if "perf/learner_busy" in record])[-NUM_EXACT:]
    if not steps:
        return None
    facts = Facts(
        config=run.config or Config(),
        state=RunState.TRAINING,
        ledger=run.ledger or ledger_of({}),
        steps=steps,
        now_s=time.time(),
    )
    return diagnose_records(facts)


def recent(steps: Sequence[Record]) -> Sequence[Record]:
    """The newest quarter of the steps, or all of fewer than NEWEST."""
    return steps[-max(NEWEST, len(steps) // 4) :]


def _cost(run: RunFiles) -> str:
    last = run.steps[-1] if run.steps else {}
    dollars, each = last.get("fleet/cost_dollars"), last.get("fleet/dollars_per_million_tokens")
    if run.summary and run.summary.cost.dollars:
        dollars, each = run.summary.cost.dollars, run.summary.cost.dollars_per_million_tokens
    if not dollars:
        return "no price is set (actors.price_per_hour)"
    return f"${dollars:.2f}" + (f", ${each:.2f} per million trained tokens" if each is not None else "")


def _failing(run: RunFiles) -> str:
    found = [f"the learner ended with an error: {run.error}"] if run.error else []
    found += [f"log of {kind} ({count})" for kind, count in run.complaints.items()]
    if skipped := run.num_refused:
        found.append(f"{skipped} steps were skipped")
    if ledger := run.ledger:
        found += [f"{count} attempts failed: {outcome}" for outcome, count in ledger.failed.items()]
        found += [] if ledger.balanced else ["the ledger is NOT BALANCED"]
        if ledger.quarantined:
            found.append(f"{ledger.quarantined} groups are quarantined")
    return "; ".join(found) or ("nothing that is recorded" if run.steps else UNKNOWN)


ANSWERS = {
    "state": _state,
    "is it learning?": _learning,
    "held-out tasks": _held_out,
    "how stale is the data?": _stale,
    "which side waits?": lambda run: str(recorded_diagnosis(run) or UNKNOWN),
    "what does it cost?": _cost,
    "is anything failing?": _failing,
}
