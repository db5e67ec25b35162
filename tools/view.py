"""A run in the terminal: is it learning, how old is the data, and which side waits for the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from common.headline import headline
from common.metrics import read_metrics
from common.run_dir import RunDir
from replay.bulletin import Bulletin, RelayNotice
from replay.fleet import Member
from tools.diagnosis import Facts, diagnose
from tools.observer import Observer
from tools.table import cell, two_columns

SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 60


class View:
    """Renders a run from its metrics file and its Redis."""

    def __init__(
        self, shards: Sequence[redis.Redis], run_dir: RunDir, run_id: str, *, num_steps: int, max_lag: int
    ) -> None:
        """`shards` are clients of the run's Redis servers."""
        self._observer = Observer(shards, run_id, max_lag=max_lag)
        self._bulletin = Bulletin(shards[0], run_id)
        self._run_dir = run_dir
        self._num_steps = num_steps

    def render(self) -> RenderableType:
        """Tables of the run's progress, its actors and its relays, as they are now."""
        records = read_metrics(self._run_dir.metrics)
        steps = [record for record in records if "trained/reward" in record]
        evaluations = [record for record in records if "eval/success_sampled" in record]
        relays = self._bulletin.relays()
        facts = self._observer.facts(steps)
        shown = [self._progress(facts, steps, evaluations), actors_table(facts.members)]
        return Group(*shown, relays_table(relays)) if relays else Group(*shown)

    def _progress(
        self, facts: Facts, records: list[dict[str, Any]], evaluations: list[dict[str, Any]]
    ) -> RenderableType:
        ledger, diagnosis = facts.ledger, diagnose(facts)
        rows = {
            "state": facts.state.value if facts.state else "not started yet",
            "FAULT" if diagnosis.is_fault else "bottleneck": str(diagnosis),
            "step": f"{records[-1]['step'] if records else 0:.0f} of {self._num_steps}",
        }
        if records:
            last = records[-1]
            rows |= {
                **_newest_episodes(records),
                "trained on": f"success {last['trained/success']:.3f}, reward {last['trained/reward']:.3f}",
                "lag": f"{last['lag/mean']:.2f} optimizer steps, {last['lag/max']:.0f} at most",
                "mismatch": f"KL {last['mismatch/kl']:.4f}, ESS {last['mismatch/effective_sample_size']:.2f}",
                "tokens/s": f"{last['fleet/generated_tokens_per_s']:.0f} generated, "
                f"{last['perf/trained_tokens_per_s']:.0f} trained",
                "actors": f"{last['fleet/num_actors']:.0f} running, {last['fleet/advised_actors']:.0f} advised",
            }
        if evaluations:
            newest = evaluations[-1]
            rows["held out"] = (
                f"{newest['eval/success_sampled']:.3f} sampled, {newest['eval/success_greedy']:.3f} greedy, "
                f"at step {newest['step']:.0f}  {sparkline([e['eval/success_sampled'] for e in evaluations])}"
            )
        dropped = ", ".join(f"{count} {reason}" for reason, count in ledger.dropped.items()) or "none"
        rows["buffer"] = (
            f"{ledger.queued} queued, {ledger.leased} leased, {ledger.ready} ready, {ledger.claimed} claimed, "
            f"{ledger.trained} trained, dropped: {dropped}" + ("" if ledger.balanced else "  NOT BALANCED")
        )
        return two_columns(f"Slipstream: {facts.run_id}", rows)


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


def actors_table(members: Sequence[Member]) -> Table:
    """What each actor among `members` does, and where it runs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("actor", "state", "version", "episodes", "tokens/s", "KV", "pause ms"):
        table.add_column(column, no_wrap=True)  # a terminal of 80 columns must show these in full
    table.add_column("runs on")
    for member in members:
        if member.role == "actor":
            table.add_row(*map(cell, _actor_row(member)))
    return table


def _actor_row(member: Member) -> list[str]:
    return [
        member.name,
        member.state.value,
        str(member.policy_version),
        f"{member.num_episodes} of {member.max_episodes}",
        f"{member.tokens_per_s:.0f}",
        f"{member.kv_use:.0%}",
        f"{1e3 * member.last_pause_s:.0f}",
        runs_on(member),
    ]


def runs_on(member: Member) -> str:
    """The actor's kind of instance, zone, price and engine. Its name already begins with that of its host."""
    price = f"{member.price_per_hour:g} $/h" if member.price_per_hour else ""
    return " ".join(filter(None, [member.instance_kind, member.zone, price, member.engine]))


def sparkline(values: list[float]) -> str:
    """The last values as a line of blocks, scaled from the lowest to the highest."""
    shown = values[-NUM_SPARKS:]
    low, span = min(shown), max(shown) - min(shown) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in shown)


def relays_table(relays: Sequence[RelayNotice]) -> Table:
    """The version that each relay serves, and how many receivers it serves."""
    table = Table("relay", "address", "version", "serves", "fetched MB", "served MB", "corrupt", title_justify="left")
    for relay in relays:
        row = [
            relay.name,
            relay.endpoint,
            str(relay.policy_version),
            f"{relay.num_children} of {relay.fan_out}",
            f"{relay.fetched_bytes / 1e6:.1f}",
            f"{relay.served_bytes / 1e6:.1f}",
            str(relay.num_corrupt),
        ]
        table.add_row(*map(cell, row))
    return table
