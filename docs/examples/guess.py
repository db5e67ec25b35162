"""Guess a number: an environment of several turns in plain language, for a small language model.

`env.name=docs.examples.guess:GuessEnv`, from the repository's folder. Each answer says where the number is, so that a
policy which halves the range finds one of 20 in five guesses. A number is a secret of its task, so held-out tasks ask
for what train tasks ask for: how to search.
"""

import random
import re

from slipstream import Message, Observation, Task


class GuessEnv:
    """One number to find. The first number in a reply is the guess; a reply without one is a guess that is lost."""

    replay_only = True  # a state is reached by doing its actions again

    def __init__(self, *, largest: int = 20, guesses: int = 5) -> None:
        self._largest, self._guesses = largest, guesses

    async def reset(self, task: Task) -> Observation:
        self._number = random.Random(task.task_id).randint(1, self._largest)
        self._low, self._high, self._left = 1, self._largest, self._guesses
        return _answer(f"I am thinking of a number from 1 to {self._largest}. Guess it.")

    async def step(self, action: str) -> Observation:
        found = re.search(r"\d{1,9}", action)
        guess = int(found[0]) if found else None
        self._left -= 1
        if guess == self._number:
            return _answer("Right!", won=True, over=True)
        if guess is None:
            return _answer("Say a number.", over=not self._left, valid=False)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        where = f"My number is from {self._low} to {self._high}."
        return _answer(f"{guess} is too {'low' if guess < self._number else 'high'}. {where}", over=not self._left)

    async def close(self) -> None:
        pass

    def snapshot(self) -> bytes:
        raise NotImplementedError("do its actions again")

    def restore(self, state: bytes) -> None:
        raise NotImplementedError("do its actions again")

    def admissible(self) -> list[str]:
        return [str(number) for number in range(1, self._largest + 1)]

    def state_key(self) -> str:
        return f"{self._low} {self._high} {self._left}"

    def expert(self) -> str:
        return str((self._low + self._high) // 2)


def _answer(text: str, *, won: bool = False, over: bool = False, valid: bool = True) -> Observation:
    return Observation(
        messages=(Message("user", text),),
        rewards={"won": float(won)},
        terminated=over,
        valid_action=valid,
        score=float(won),
        success=won,
    )
