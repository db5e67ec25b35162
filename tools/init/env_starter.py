"""An environment of your own. An episode: the task says how often, the policy says "up" so often, then "done"."""

import random

from slipstream import Message, Observation, Task


class MyEnv:
    replay_only = True  # a state is reached by doing its actions again

    def __init__(self, *, largest: int = 5) -> None:
        """The arguments are `env.options`."""
        self.largest = largest

    async def reset(self, task: Task) -> Observation:
        """Begin the world of `task`, which is the same everywhere: it follows from the task's id alone."""
        self.wanted, self.count = random.Random(task.task_id).randint(1, self.largest), 0
        return Observation(messages=(Message("user", f"say up {self.wanted} times, then done"),), rewards={})

    async def step(self, action: str) -> Observation:
        """What follows the policy's action. Rewards have names; the score, 0 to 1, is the task's own measure."""
        self.count += action == "up"
        success = action == "done" and self.count == self.wanted
        return Observation(
            messages=(Message("user", f"{self.count}"),),
            rewards={"counted": float(success)},
            terminated=action == "done",
            valid_action=action in ("up", "done"),
            score=float(success),
            success=success,
        )

    async def close(self) -> None:
        """Let go of what the world holds: processes, files, connections."""

    def snapshot(self) -> bytes:
        raise NotImplementedError("replay its actions")

    def restore(self, state: bytes) -> None:
        raise NotImplementedError("replay its actions")

    def admissible(self) -> list[str] | None:
        """The actions that are possible now; None where they cannot be listed."""
        return ["up", "done"]

    def state_key(self) -> str:
        """A text that is equal for equal states; "" where they cannot be distinguished."""
        return f"{self.wanted} {self.count}"

    def expert(self) -> str:
        """The right action, for a warm start. Raise NotImplementedError if you know none."""
        return "up" if self.count < self.wanted else "done"
