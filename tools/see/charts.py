"""The charts of a report. A chart whose numbers are not recorded is None."""

from collections.abc import Sequence
from statistics import fmean

from slipstream.common.process.headline import wilson
from slipstream.tools.see.blocks import Chart
from slipstream.tools.see.chart import Layer, Line, Point, layer_chart, line_chart, plain, share_bars
from slipstream.tools.see.run_files import Record, RunFiles

MAX_BINS = 60  # of a line
PRODUCED_BINS = 20  # wider, as each needs enough episodes
STEPS = "optimizer steps"
# The parts of a step's time that docs/metrics.md explains, the largest first.
LARGE_PARTS = ("wait", "forward", "backward", "optimizer", "measure", "proximal")
SMALL_PARTS = ("reference", "pack", "publish", "archive", "record", "checkpoint", "evaluate")
PARTS = LARGE_PARTS + SMALL_PARTS
SHOWN_SHARE = 0.02  # smaller parts of a step's time are drawn together
STATES = ("trained", "queued", "leased", "judging", "ready", "claimed", "quarantined")


def success(runs: Sequence[RunFiles]) -> Chart | None:
    lines = []
    for run in runs:
        points = [_fraction(*found) for found in _produced(run.steps, "produced/success")]
        lines += [Line(name=_named("all episodes", run, runs), points=points)] if points else []
        for how in ("sampled", "greedy") if len(runs) == 1 else ("sampled",):
            marks = [
                _fraction(record["step"], record[f"eval/success_{how}"], record["eval/num_tasks"])
                for record in run.evaluations
                if f"eval/success_{how}" in record and record.get("eval/num_tasks", 0) >= 1
            ]
            lines += [Line(name=_named(f"held-out, {how}", run, runs), points=marks, is_marks=True)] if marks else []
    return _lines(
        "success", "Success of all finished episodes, and of held-out tasks (95 % intervals).", lines, "success", 1.0
    )


def reward(runs: Sequence[RunFiles]) -> Chart | None:
    lines = []
    for run in runs:
        points = [(step, mean) for step, mean, _ in _produced(run.steps, "produced/reward")]
        lines += [Line(name=_named("all episodes", run, runs), points=plain(points))] if points else []
    return _lines("reward", "Mean return of all finished episodes.", lines, "reward")


def lag(runs: Sequence[RunFiles]) -> Chart | None:
    names = {"lag/max": "largest", "lag/mean": "oldest token", "lag/newest_mean": "newest token"}
    lines = _series(runs, names if len(runs) == 1 else {"lag/mean": "oldest token"})
    run = runs[0]
    if lines and len(runs) == 1 and run.config:
        ends = (run.steps[0]["step"], run.steps[-1]["step"])
        for name in ("target_lag", "max_lag"):
            limit = float(getattr(run.config.replay, name))
            lines.append(Line(name=name, points=plain([(ends[0], limit), (ends[1], limit)]), is_limit=True))
    return _lines("lag", "From sampling to training, in optimizer steps.", lines, "lag in optimizer steps")


def sample_size(runs: Sequence[RunFiles]) -> Chart | None:
    lines = _series(runs, {"mismatch/effective_sample_size": "of tokens"})
    question = "Effective sample size: the share of the tokens that still tells about the current policy."
    return _lines("sample_size", question, lines, "fraction", 1.0)


def step_time(run: RunFiles) -> Chart | None:
    """What the learner does in a step."""
    steps = [record for record in run.steps if "time/wait_s" in record]
    if not steps:
        return None
    bins = _binned(steps, MAX_BINS)
    means = {
        part: [fmean(record.get(f"time/{part}_s", 0.0) for record in records) for records in bins] for part in PARTS
    }
    whole = sum(map(sum, means.values()))
    large = [part for part in PARTS if sum(means[part]) >= SHOWN_SHARE * whole]
    layers = [Layer(name=part, values=means[part]) for part in large]
    rest = [values for part, values in means.items() if part not in large]
    if rest:
        layers.append(Layer(name="other", values=[sum(values) for values in zip(*rest, strict=True)]))
    svg = layer_chart(layers, [records[-1]["step"] for records in bins], across=STEPS, upwards="seconds of a step")
    return Chart(name=f"step_time_{run.name}", question=f"What the learner does in a step of {run.name}.", svg=svg)


def episode_time(runs: Sequence[RunFiles]) -> Chart | None:
    """What the actors' episodes wait for."""
    bars = []
    for run in runs:
        if (spent := run.episode_time) and spent.total_s > 0:
            rest = max(0.0, spent.total_s - spent.generate_s - spent.env_s)
            parts = [("generation", spent.generate_s), ("environment", spent.env_s), ("other", rest)]
            bars.append((f"{run.name}, {spent.num_episodes} episodes", parts))
    if not bars:
        return None
    question = "What the actors' episodes spend their time on, by a sample of the archive."
    return Chart(name="episode_time", question=question, svg=share_bars(bars))


def speed(runs: Sequence[RunFiles]) -> Chart | None:
    names = {"fleet/generated_tokens_per_s": "generated", "perf/trained_tokens_per_s": "trained"}
    return _lines(
        "speed",
        "Tokens a second: sampled by the actors, and trained on, prompts included.",
        _series(runs, names),
        "tokens/s",
    )


def goodput(runs: Sequence[RunFiles]) -> Chart | None:
    lines = _series(runs, {"perf/goodput": "goodput"})
    return _lines("goodput", "Share of the tokens that are trained and not dropped.", lines, "fraction", 1.0)


def cost(runs: Sequence[RunFiles]) -> Chart | None:
    lines = _series(runs, {"fleet/cost_dollars": "dollars"})
    return _lines("cost", "Cost of the actors so far.", lines, "dollars")


def accounts(runs: Sequence[RunFiles]) -> Chart | None:
    """Where every group that was opened ended."""
    bars = []
    for run in runs:
        if run.ledger is None:
            continue
        counts = {state: getattr(run.ledger, state) for state in STATES}
        counts |= {f"dropped: {reason}": count for reason, count in run.ledger.dropped.items()}
        if found := [(name, float(count)) for name, count in counts.items() if count > 0]:
            bars.append((run.name, found))
    if not bars:
        return None
    return Chart(name="accounts", question="Where every group that was opened is.", svg=share_bars(bars))


def _series(runs: Sequence[RunFiles], names: dict[str, str]) -> list[Line]:
    """A line for each run and metric that it has, averaged in bins of steps."""
    lines = []
    for run in runs:
        for name, shown in names.items():
            having = [record for record in run.steps if name in record]
            means = [
                (records[-1]["step"], fmean(record[name] for record in records))
                for records in _binned(having, MAX_BINS)
            ]
            lines += [Line(name=_named(shown, run, runs), points=plain(means))] if means else []
    return lines


def _produced(steps: Sequence[Record], name: str) -> list[tuple[float, float, float]]:
    """Of each bin of steps the last step, the mean of `name` over its finished episodes, and their number."""
    counted = [record for record in steps if name in record and record.get("produced/episodes", 0) >= 1]
    means = []
    for records in _binned(counted, PRODUCED_BINS):
        counts = [record["produced/episodes"] for record in records]
        if sum(counts) >= 1:
            total = sum(record[name] * count for record, count in zip(records, counts, strict=True))
            means.append((records[-1]["step"], total / sum(counts), sum(counts)))
    return means


def _fraction(step: float, share: float, count: float) -> Point:
    low, high = wilson(min(max(share, 0.0), 1.0), round(count))
    return Point(x=step, value=share, low=low, high=high)


def _binned(records: Sequence[Record], num_bins: int) -> list[Sequence[Record]]:
    """The records in at most `num_bins` parts of equal length."""
    size = max(1, -(-len(records) // num_bins))
    return [records[start : start + size] for start in range(0, len(records), size)]


def _named(name: str, run: RunFiles, runs: Sequence[RunFiles]) -> str:
    return name if len(runs) == 1 else f"{run.name}: {name}"


def _lines(name: str, question: str, lines: list[Line], upwards: str, highest: float | None = None) -> Chart | None:
    if not lines:
        return None
    svg = line_chart(lines, across=STEPS, upwards=upwards, highest=highest)
    return Chart(name=name, question=question, svg=svg)
