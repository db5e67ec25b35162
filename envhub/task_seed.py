"""Where a task's randomness comes from, and which split its text belongs to."""

import hashlib
import random
import zlib

from common.trajectory import Task

HELD_OUT_ONE_IN = 8


def task_rng(task: Task, *, world: str) -> random.Random:
    """Return the generator of `task` in `world`, such as "shop/small": the same on every machine.

    Raises ValueError for a split that does not exist.
    """
    if task.split not in ("train", "held_out"):
        raise ValueError(f"task {task.task_id}: split must be train or held_out, got {task.split!r}")
    digest = hashlib.blake2b(f"{world}/{task.split}/{task.index}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "little"))


def split_of(text: str) -> str:
    """Return the split that may hold a task which reads as `text`.

    Seeds alone would keep the splits apart only where texts are plenty: a small world says the same thing twice. So the
    text itself decides, one in eight is held out, and a generator draws again until the answer is the task's own split.
    """
    return "held_out" if zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0 else "train"
