"""The tables of a report: accounts, cost, faults, settings, and the commands that continue from the run."""

import shlex
from collections.abc import Callable, Mapping, Sequence

from slipstream.common.config.config import Config, key_paths, value_of
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.records.ledger import STATES
from slipstream.replay.run.diagnosis import was_refused
from slipstream.tools.see.blocks import Block, Commands, Rows, Words
from slipstream.tools.see.run_files import RunFiles

OF_THE_PLACE = ("run.name", "run.root", "redis.url")  # settings that differ between any two runs
MAX_SHOWN_CHARS = 200  # of a setting


def accounts(runs: Sequence[RunFiles]) -> list[Block]:
    """The ledger: groups, then trajectories."""
    if not any(run.ledger for run in runs):
        return []
    sources = ", ".join(f"{run.name}: {run.ledger_source}" for run in runs if run.ledger)
    return [_table(runs, _accounts), Words(text=f"Read from {sources}.")]


def cost(runs: Sequence[RunFiles]) -> Rows:
    """Tokens and dollars."""
    return _table(runs, _cost)


def faults(runs: Sequence[RunFiles]) -> Rows:
    """What went wrong and was repeated, refused or set aside; zeros too, as they are the news of a good run."""
    return _table(runs, _faults)


def settings(runs: Sequence[RunFiles]) -> list[Block]:
    """The settings that differ from the defaults in any of the runs; of several runs, first those between them."""
    configs = [run.config for run in runs]
    known, defaults = [config for config in configs if config], Config()
    if not known:
        return []
    changed = [
        path
        for path in key_paths()
        if path not in OF_THE_PLACE and any(value_of(config, path) != value_of(defaults, path) for config in known)
    ]
    between = [path for path in changed if any(value_of(config, path) != value_of(known[0], path) for config in known)]
    head = ["setting", "default", *(run.name for run in runs)]

    def row(path: str) -> list[str]:
        values = [_shown(value_of(config, path)) if config else "unknown" for config in configs]
        return [path, _shown(value_of(defaults, path)), *values]

    blocks: list[Block] = []
    if len(runs) > 1:
        blocks.append(Words(text="Between the runs:" if between else "The runs have the same settings."))
        blocks += [Rows(head=head, rows=[row(path) for path in between])] if between else []
    same = [path for path in changed if path not in between]
    return [*blocks, Words(text="Different from the defaults:"), Rows(head=head, rows=[row(path) for path in same])]


def commands(runs: Sequence[RunFiles]) -> Commands:
    """How to repeat, continue and look into each run."""
    lines = []
    for run in runs:
        config, name = shlex.quote(str(run.path / "config.yaml")), shlex.quote(run.name)
        root = "" if str(run.path.parent) == "runs" else f" run.root={shlex.quote(str(run.path.parent))}"
        lines += [
            f"slipstream up {config} run.name={name}-again{_own_server(run)}   # the same settings again",
            f"slipstream learner --replay-archive {name}{root}   # the same steps again, from the archive",
            f"slipstream up --resume {name}{root} learner.steps=MORE   # continue",
            f"slipstream eval run.name={name}{root}   # held-out success of the trained model",
            f"slipstream view {shlex.quote(str(run.path.absolute()))}   # look into the episodes",
            f"slipstream replay export {name}.jsonl run.name={name}{root}   # the episodes as rows",
        ]
    return Commands(lines=lines)


def _own_server(run: RunFiles) -> str:
    """The setting that gives the next run a server of its own, if this run had one, which ended with it."""
    return " \"redis.url=''\"" if (RunDir(run.path.parent, run.path.name).redis / "redis.conf").exists() else ""


def _accounts(run: RunFiles) -> Mapping[str, str]:
    if (ledger := run.ledger) is None:
        return {}
    rows = {"groups opened": ledger.opened, "groups trained": ledger.trained}
    rows |= {f"groups dropped: {reason}": count for reason, count in ledger.dropped.items()}
    rows |= {f"groups {state}": getattr(ledger, state) for state in STATES if getattr(ledger, state)}
    rows |= {"trajectories inserted": ledger.inserted, "trajectories trained": ledger.trained_trajectories}
    rows |= {f"trajectories dropped: {reason}": count for reason, count in ledger.dropped_trajectories.items()}
    counts = {name: f"{count:,}" for name, count in rows.items()}
    return counts | {"every group and trajectory is in one account": "yes" if ledger.balanced else "NO"}


def _cost(run: RunFiles) -> Mapping[str, str]:
    if (summary := run.summary) is None:
        return {}
    spent, speed = summary.cost, summary.tokens_per_s
    each = spent.dollars_per_million_tokens
    rows = {
        "tokens trained": f"{spent.tokens_trained:,}",
        "tokens wasted": ", ".join(f"{tokens:,} {reason}" for reason, tokens in spent.wasted_tokens.items()) or "none",
        "tokens a second, generated": f"{speed.generated:.0f}",
        "tokens a second, trained": f"{speed.trained:.0f}",
        "the actors' machines": f"${spent.dollars:.2f}" if spent.dollars else "no price is set (actors.price_per_hour)",
        "first reward": f"after {summary.first_reward_s:.0f} s" if summary.first_reward_s is not None else "none",
        "whole run": f"{summary.wall_s:.0f} s",
    }
    return rows | ({"a million trained tokens": f"${each:.2f}"} if each is not None else {})


def _faults(run: RunFiles) -> Mapping[str, str]:
    rows = {f"log of {kind}": str(count) for kind, count in run.complaints.items()}
    if run.steps:
        skipped = sum(map(was_refused, run.steps))
        rows["optimizer steps skipped"] = str(skipped)
    if (ledger := run.ledger) is None:
        return rows
    failed = ", ".join(f"{count} {outcome}" for outcome, count in ledger.failed.items())
    return rows | {
        "attempts that failed and were redone": failed or "0",
        "members redone": str(ledger.redone_members),
        "leases that expired": str(ledger.expired_leases),
        "parts of episodes handed in, and continued": f"{ledger.partials_handed_in}, {ledger.partials_resumed}",
        "inserts that were repeated, and counted once": str(ledger.dedup_hits),
        "inserts of actors that had lost their lease, refused": str(ledger.fenced_inserts),
        "groups quarantined": str(ledger.quarantined),
        "repairs of damaged books": str(ledger.repairs),
    }


def _table(runs: Sequence[RunFiles], rows_of: Callable[[RunFiles], Mapping[str, str]]) -> Rows:
    columns = [rows_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Rows(head=["", *(run.name for run in runs)], rows=rows or [["", *("not recorded" for _ in runs)]])


def _shown(value: object) -> str:
    text = str(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
