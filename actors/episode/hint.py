"""The text that shows failed attempts at a task to the policy, at the end of the first messages of a new one."""

from collections.abc import Sequence

from slipstream.actors.episode.episode_record import Exchange

INTRODUCTION = "You have attempted this task before."
REQUEST = "Attempt the task again from the start. Learn from these attempts."
FAILED = "This attempt failed."


def hint_of(attempts: Sequence[Sequence[Exchange]]) -> str:
    """Every action of the attempts and its answer; "" without attempts."""
    if not attempts:
        return ""
    parts = [INTRODUCTION]
    for number, exchanges in enumerate(attempts, start=1):
        parts.append(f"Attempt {number}:")
        for exchange in exchanges:
            parts += [f"> {exchange.action}", *(message.content for message in exchange.answer)]
        parts.append(FAILED)
    return "\n".join([*parts, REQUEST])
