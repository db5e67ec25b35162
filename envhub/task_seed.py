"""The random generator of a task, and the split that a task's text belongs to."""

import hashlib
import random
import zlib

from slipstream.common.records.trajectory import Task

HELD_OUT_ONE_IN = 8


def task_rng(task: Task, *, world: str) -> random.Random:
    """Return the random generator of `task` in `world`, such as "shop/small". It is the same on every machine.

    Raises ValueError for an unknown split.
    """
    if task.split not in ("train", "held_out"):
        raise ValueError(f"task {task.task_id}: split must be train or held_out, got {task.split!r}")
    digest = hashlib.blake2b(f"{world}/{task.split}/{task.index}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "little"))


def split_of(text: str) -> str:
    """Return the split that a task with this text belongs to.

    Different seeds alone do not keep the splits apart: a small world can produce the same text twice. So the hash of
    the text decides, and one text in eight is held out. A generator draws again until the text is in the task's split.
    """
    return "held_out" if zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0 else "train"
