"""A trained episode as text: a line of `samples.jsonl`."""

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One of the episodes that a step shows."""

    step: int
    time: float  # unix
    which: str  # of the step's episodes: best, worst or random
    task_id: str
    total_reward: float = msgspec.field(name="return")
    success: bool
    num_turns: int
    text: str
