"""A run in the terminal: is it learning, how old is the data, and which side waits for the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any

import redis
from rich.console import Console, Group, RenderableType

from slipstream.common.config.config import Config
from slipstream.common.process.headline import headline, held_out
from slipstream.common.process.metrics import MetricsFile
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.run.diagnosis import Facts, diagnose
from slipstream.replay.run.observer import Observer
from slipstream.tools.see.fleet_tables import actors_table, relays_table
from slipstream.tools.see.summary import counts
from slipstream.tools.terminal.table import cell, two_columns

SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 40  # a terminal of 80 columns has room for these
NUM_PACE_STEPS = 20  # the newest steps, whose pace tells the time that is left


class View:
    """Renders a run from its metrics file and its Redis."""

    def __init__(self, client: redis.Redis, run_dir: RunDir, config: Config) -> None:
        self._observer = Observer(client, config, log=run_dir.log("learner"))
        self._bulletin = Bulletin(client, config.run.name)
        self._metrics = MetricsFile(run_dir.metrics)
        self._config = config

    def render(self) -> RenderableType:
        """Tables of the run's progress, its actors and its relays, as they are now."""
        steps, evaluations = self._records()
        relays = self._bulletin.relays()
        facts = self._observer.facts(steps)
        shown = [self._progress(facts, steps, evaluations), actors_table(facts.census.alive)]
        return Group(*shown, relays_table(relays)) if relays else Group(*shown)

    def _records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The records of optimizer steps, and those of evaluations."""
        records = self._metrics.records() or self._observer.published_steps()
        return (
            [record for record in records if "trained/reward" in record],
            [record for record in records if "eval/success_sampled" in record],
        )

    def _progress(
        self, facts: Facts, records: list[dict[str, Any]], evaluations: list[dict[str, Any]]
    ) -> RenderableType:
        ledger, diagnosis = facts.ledger, diagnose(facts)
        rows = {
            "state": facts.state.value if facts.state else "not started yet",
            "FAULT" if diagnosis.is_fault else "bottleneck": str(diagnosis),
            "step": f"{records[-1]['step'] if records else 0:.0f} of {self._config.learner.steps}",
        }
        if records:
            last = records[-1]  # without what was not finite, such as the mismatch with a policy that has collapsed
            rows |= {
                **_newest_episodes(records),
                "trained on": f"success {last['trained/success']:.3f}, reward {last['trained/reward']:.3f}",
                "lag": f"{last['lag/mean']:.2f} optimizer steps, {last['lag/max']:.0f} at most",
                "mismatch": f"KL {last.get('mismatch/kl', math.nan):.4f}, "
                f"ESS {last.get('mismatch/effective_sample_size', math.nan):.2f}",
                "tokens/s": f"{last['fleet/generated_tokens_per_s']:.0f} generated, "
                f"{last['perf/trained_tokens_per_s']:.0f} trained",
                "actors": f"{last['fleet/num_actors']:.0f} running, {last['fleet/advised_actors']:.0f} advised",
                "cost": _cost(last),
                "time left": _time_left(records, num_steps=self._config.learner.steps),
            }
        if evaluations:
            newest = evaluations[-1]
            course = sparkline([record["eval/success_sampled"] for record in evaluations])
            rows["held out"] = f"{held_out(newest)}, at step {newest['step']:.0f}  {course}"
        rows["buffer"] = (
            f"{ledger.unclaimed}, {ledger.claimed} claimed, {ledger.trained} trained, dropped: {counts(ledger.dropped)}"
            f"{'' if ledger.balanced else '  NOT BALANCED'}"
        )
        return two_columns(f"Slipstream: {self._config.run.name}", rows)


def show(console: Console, update: Callable[[], None]) -> None:
    """Call `update`. A view never ends a run: an error is printed, and the caller tries again."""
    try:
        update()
    except redis.RedisError:
        pass  # Redis is away for a moment: keep what is shown
    except Exception as error:
        console.print(cell(f"cannot show the run: {type(error).__name__}: {error}; the run itself continues"))


def _newest_episodes(records: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Success and reward of the newest episodes; empty if no episode has finished."""
    newest, produced = headline(records), [record for record in records if "produced/success" in record]
    if newest is None:
        return {}
    return {
        "success": f"{newest.success:.3f}  {sparkline([record['produced/success'] for record in produced])}",
        "reward": f"{newest.reward:.3f}  {sparkline([record['produced/reward'] for record in produced])}",
        "of": f"the last {newest.num_episodes} episodes; their success is {newest.low:.3f} to {newest.high:.3f} (95 %)",
    }


def _cost(last: Mapping[str, float]) -> str:
    """The dollars of the run's actors; a hint if no price is configured."""
    if not last.get("fleet/cost_dollars"):
        return "unknown; set actors.price_per_hour"
    tokens = last.get("fleet/dollars_per_million_tokens")
    return f"${last['fleet/cost_dollars']:.2f}, ${last['fleet/dollars_per_hour']:.2f} an hour now" + (
        f", ${tokens:.2f} per million trained tokens" if tokens else ""
    )


def _time_left(records: Sequence[Mapping[str, float]], *, num_steps: int) -> str:
    """The time that the remaining steps take if each takes as long as the newest ones, evaluations not included."""
    step_s = fmean(record["perf/step_s"] for record in records[-NUM_PACE_STEPS:])
    return f"about {timedelta(seconds=round((num_steps - records[-1]['step']) * step_s))}"


def sparkline(values: list[float]) -> str:
    """The last values as a line of blocks, scaled from the lowest to the highest."""
    shown = values[-NUM_SPARKS:]
    low, span = min(shown), max(shown) - min(shown) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in shown)
