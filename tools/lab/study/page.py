"""Writes the results of the study of lag: the numbers as JSON, their tables in a page, and a plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from slipstream.common.process.output import write_whole
from slipstream.tools.lab.bench.benchmark import with_text
from slipstream.tools.lab.study.plot import Line, Point, svg
from slipstream.tools.lab.study.run import Run

SMOOTHED = 20  # steps
CAUSES = ("arm", "lag", "delay, points", "tokens left out or clipped, %", "sample size lost, %")
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a study; means are over its steps."""

    arm: str
    lag: int  # optimizer steps
    seed: int
    held_out: float  # success of the last weights on held-out tasks
    success: list[float]  # of the episodes that were sampled for each step
    effective_sample_size: float  # mean, as a fraction of the loss tokens
    mismatch_kl: float  # mean, nats a token
    masked_fraction: float  # mean, of the loss tokens
    clip_fraction: float  # mean, of the loss tokens that the surrogate clipped
    num_guarded: int  # steps that the guard shrank or skipped
    entropy: float  # nats a token, in the last step
    episodes: int  # sampled for all steps, including those of dropped groups

    @classmethod
    def of(cls, run: Run, *, arm: str, lag: int, seed: int) -> Self:
        steps = run.steps
        return cls(
            arm=arm,
            lag=lag,
            seed=seed,
            held_out=run.held_out,
            success=[round(success, 4) for success in run.success],
            effective_sample_size=_mean([step.effective_sample_size for step in steps]),
            mismatch_kl=_mean([step.mismatch_kl for step in steps]),
            masked_fraction=_mean([step.masked_fraction for step in steps]),
            clip_fraction=_mean([step.clip_fraction_high + step.clip_fraction_low for step in steps]),
            num_guarded=sum(step.guard_scale < 1 for step in steps),
            entropy=round(steps[-1].entropy, 4),
            episodes=run.episodes,
        )


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command of a study, and its results."""

    command: str
    date: str
    steps: int  # optimizer steps of each run
    held_out_tasks: int
    arms: dict[str, list[str]]  # the changes of each to the default objective
    results: list[Result]

    def of(self, arm: str, lag: int) -> list[Result]:
        """One result per seed."""
        return [result for result in self.results if (result.arm, result.lag) == (arm, lag)]

    @property
    def lags(self) -> list[int]:
        return sorted({result.lag for result in self.results})


def write(study: Study, folder: Path, *, name: str) -> None:
    """Write NAME.json and NAME.svg into `folder`, and the table into NAME.md there, between its two marks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{name}.json", msgspec.json.format(msgspec.json.encode(study), indent=1).decode() + "\n")
    write_whole(folder / f"{name}.svg", _plot(study))
    page = folder / f"{name}.md"
    write_whole(page, with_text(page.read_text() if page.exists() else BEGIN + END + "\n", "results", tables(study)))


def tables(study: Study) -> str:
    """In Markdown, the success by arm and lag; the JSON file has all numbers."""
    lags = [f"lag {lag}" for lag in study.lags]
    success = [[arm, *(_success(study.of(arm, lag)) for lag in study.lags)] for arm in study.arms]
    return (
        f"Success of the last weights on {study.held_out_tasks} held-out tasks, sampled: mean ± standard deviation "
        f"over seeds (their number), in %.\n\n{markdown(['arm', *lags], success)}\n"
        f"What lag does to the data, means over steps and seeds:\n\n{markdown(CAUSES, _causes(study))}\n"
        f"`{study.command}`, {study.date}.\n"
    )


def _causes(study: Study) -> list[list[str]]:
    """A row for each arm and lag above 0. An arm that did not run without lag has the delay of the others."""
    rows, without_lag = list[list[str]](), [result for result in study.results if result.lag == 0]
    for arm in study.arms:
        for lag in filter(None, study.lags):
            if results := study.of(arm, lag):
                delays = [delay(each.success, lag) for each in study.of(arm, 0) or without_lag]
                rows.append(
                    [
                        arm,
                        str(lag),
                        f"{100 * statistics.fmean(delays):.1f}" if delays else "",
                        f"{100 * statistics.fmean(each.masked_fraction + each.clip_fraction for each in results):.1f}",
                        f"{100 * (1 - statistics.fmean(each.effective_sample_size for each in results)):.1f}",
                    ]
                )
    return rows


def delay(success: Sequence[float], lag: int) -> float:
    """What a run without lag would lack if it stood `lag` steps earlier: by the means of SMOOTHED steps."""
    earlier = success[max(0, len(success) - SMOOTHED - lag) :][:SMOOTHED]
    return statistics.fmean(success[-SMOOTHED:]) - statistics.fmean(earlier)


def _success(results: Sequence[Result]) -> str:
    """Mean, standard deviation and number of values in percent, as `81 ± 2.1 (3)`."""
    values = [result.held_out for result in results]
    if not values:
        return ""
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation} ({len(values)})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plot(study: Study) -> str:
    lines = []
    for arm in study.arms:
        found = [(lag, [result.held_out for result in study.of(arm, lag)]) for lag in study.lags]
        points = [
            Point(
                column=study.lags.index(lag),
                value=statistics.fmean(values),
                deviation=statistics.stdev(values) if len(values) > 1 else 0.0,
            )
            for lag, values in found
            if values
        ]
        lines.append(Line(name=arm, points=points))
    return svg(
        lines,
        columns=[str(lag) for lag in study.lags],
        across="lag in optimizer steps",
        upwards="held-out success: mean and standard deviation over seeds",
    )


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 5)
