"""What a person sees of a run: is it learning, how old is the data, and who waits for whom."""

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from common.metrics import read_metrics
from common.run_dir import RunDir
from replay.bulletin import Bulletin, RelayNotice
from replay.fleet import Fleet, Member, UnknownRun
from replay.shards import read_shards
from tools.table import two_columns

SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 60


class View:
    """A run, as its metrics file and its Redis tell it."""

    def __init__(self, shards: Sequence[redis.Redis], run_dir: RunDir, run_id: str, *, num_steps: int) -> None:
        """`shards` are the clients of the run's servers."""
        self._shards = shards
        self._fleet = Fleet(shards[0], run_id)
        self._bulletin = Bulletin(shards[0], run_id)
        self._run_dir = run_dir
        self._run_id = run_id
        self._num_steps = num_steps

    def render(self) -> RenderableType:
        """The whole picture, now."""
        records = read_metrics(self._run_dir.metrics)
        steps = [record for record in records if "reward/mean" in record]
        evaluations = [record for record in records if "eval/success_sampled" in record]
        relays = self._bulletin.relays()
        shown = [self._progress(steps, evaluations), self._actors()]
        return Group(*shown, relays_table(relays)) if relays else Group(*shown)

    def _progress(self, records: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> RenderableType:
        ledger = read_shards(self._shards, self._run_id)
        rows = {"state": self._state(), "step": f"{records[-1]['step'] if records else 0:.0f} of {self._num_steps}"}
        if records:
            last = records[-1]
            rows |= {
                "reward": f"{last['reward/mean']:.3f}  {sparkline([r['reward/mean'] for r in records])}",
                "success": f"{last['reward/success']:.3f}  {sparkline([r['reward/success'] for r in records])}",
                "lag": f"{last['lag/mean']:.2f} optimizer steps, {last['lag/max']:.0f} at most",
                "mismatch": f"KL {last['mismatch/kl']:.4f}, ESS {last['mismatch/effective_sample_size']:.2f}",
                "tokens/s": f"{last['fleet/generated_tokens_per_s']:.0f} generated, "
                f"{last['perf/trained_tokens_per_s']:.0f} trained",
                "who waits": who_waits(last),
                "actors": f"{last['fleet/num_actors']:.0f}, advised are {last['fleet/advised_actors']:.0f}",
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
        return two_columns(f"Slipstream: {self._run_id}", rows)

    def _actors(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("actor", "state", "version", "episodes", "tokens/s", "KV", "pause ms"):
            table.add_column(column, no_wrap=True)  # what a terminal of 80 columns must show whole
        table.add_column("runs on")
        for member in self._fleet.members():
            if member.role == "actor":
                table.add_row(
                    member.name, member.state.value, str(member.policy_version),
                    f"{member.num_episodes} of {member.max_episodes}", f"{member.tokens_per_s:.0f}",
                    f"{member.kv_use:.0%}", f"{1e3 * member.last_pause_s:.0f}", runs_on(member),
                )  # fmt: skip
        return table

    def _state(self) -> str:
        try:
            return self._fleet.run_state().value
        except UnknownRun:
            return "not there yet"


def runs_on(member: Member) -> str:
    """What is known of its host beside the name, which the actor's begins with, and of its engine."""
    price = f"{member.price_per_hour:g} $/h" if member.price_per_hour else ""
    return " ".join(filter(None, [member.instance_kind, member.zone, price, member.engine]))


def who_waits(step: Mapping[str, float]) -> str:
    """The side that holds the other up, from the share of a step that the learner waited."""
    busy = step["perf/learner_busy"]
    if busy > 0.9:
        return f"actors wait for the learner (busy {busy:.0%})"
    if busy < 0.5:
        return f"the learner waits for actors (busy {busy:.0%})"
    return f"neither much (learner busy {busy:.0%})"


def sparkline(values: list[float]) -> str:
    """The last values as a line of blocks, lowest to highest."""
    shown = values[-NUM_SPARKS:]
    low, span = min(shown), max(shown) - min(shown) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in shown)


def relays_table(relays: Sequence[RelayNotice]) -> Table:
    """What each relay holds, and whom it serves."""
    table = Table(
        "relay", "address", "version", "serves", "fetched MB", "served MB", "wrong bytes met", title_justify="left"
    )
    for relay in relays:
        table.add_row(
            relay.name, relay.endpoint, str(relay.policy_version), f"{relay.num_children} of {relay.fan_out}",
            f"{relay.fetched_bytes / 1e6:.1f}", f"{relay.served_bytes / 1e6:.1f}", str(relay.num_corrupt),
        )  # fmt: skip
    return table
