"""Finds what a run has lost, by its books, a recount, its archive, and training once more on that."""

from collections import Counter

import redis

from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import MAX_TRAJECTORY_BYTES
from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.run.archive import Archive

CHOSEN = ("zero_variance", "low_variance", "too_old")  # groups that the learner itself lets go of


def what_is_lost(client: redis.Redis, config: Config, *, last_step: int) -> list[str]:
    """Contradictions of books, recount and archive, and the groups that were dropped without the learner's request.

    The run must have ended in order, after `last_step`.
    """
    run_id, ledger = config.run.name, read_ledger(client, config.run.name)
    lost = audit(client, run_id)
    if not ledger.balanced:
        lost.append(f"the ledger does not balance: {ledger}")
    given_up = {reason: count for reason, count in ledger.dropped.items() if reason not in CHOSEN}
    lost += [f"{count} groups were given up: {reason}" for reason, count in given_up.items()]
    archive = Archive(RunDir(config.run.root, run_id).trajectories, run_id)
    missing = set(range(1, last_step + 1)) - set(archive.steps)
    lost += [f"step {step} is not in the archive" for step in sorted(missing)]
    limit = config.replay.group_size * MAX_TRAJECTORY_BYTES
    uses = Counter(group for step in archive.steps for group in archive.group_ids(step, max_group_bytes=limit))
    lost += [f"group {group} was trained {num} times" for group, num in uses.items() if num > config.replay.max_uses]
    return lost
