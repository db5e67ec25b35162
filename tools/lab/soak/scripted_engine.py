"""An engine without a model: a function writes the tokens, and a schedule sets the time of each.

For tests, and to measure the cost of the loop around an engine: only the schedule takes time.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slipstream.actors.engine.engine import Completion, EngineDied, EngineLoad, Served
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.tool_call import ParsedAnswer
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.transfer.weights import Offer


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The times of tokens: token i of a request is due `prefill_s + (i + 1) * token_time_s` after the request."""

    token_time_s: float
    prefill_s: float = 0.0

    def due_s(self, num_tokens: int) -> float:
        """Seconds from the request to its token `num_tokens`, counted from 1."""
        return self.prefill_s + num_tokens * self.token_time_s


class ScriptedEngine:
    """An Engine that runs a script: `script(tokens, seed)` returns the whole turn with its end token."""

    def __init__(
        self,
        script: Callable[[list[int], int | None], list[int]],
        *,
        policy_version: int,
        schedule: Schedule,
        max_tokens: int,
    ) -> None:
        self._script = script
        self._schedule = schedule
        self._max_tokens = max_tokens
        self._versions = [policy_version]
        self._served = Served(policy_version)
        self._commit_times_s: list[float] = []  # of self._versions[1:], by the loop's clock
        self._staged_version: int | None = None
        self._running: set[asyncio.Future[None]] = set()
        self._generated_tokens = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "scripted"

    @property
    def policy_version(self) -> int:
        """The version that samples the next token."""
        return self._versions[-1]

    async def serving(self, policy_version: int) -> None:
        await self._served.reach(policy_version)

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Return the script's turn after `tokens`, when its last token is due. All log-probabilities are 0.

        Raises ValueError for a prompt that leaves no room and for an empty turn, EngineDied after `close`.
        """
        started_s = asyncio.get_running_loop().time()
        if self._closed:
            raise EngineDied("the engine is closed")
        turn = self._script(tokens, seed)
        room = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        if not turn or room < 1:
            raise ValueError(
                f"{len(turn)} scripted tokens after a prompt of {len(tokens)}, with `model.max_tokens` = "
                f"{self._max_tokens}; both must leave room"
            )
        written = turn[:room]
        await self._until(started_s + self._schedule.due_s(len(written)))
        self._generated_tokens += len(written)
        return Completion(
            tokens=written,
            logprobs=[0.0] * len(written),
            kept=kept_sets([[token] for token in written]) if sampling.is_cut else None,
            version_spans=self._spans(started_s, len(written)),
            finish_reason="stop" if len(turn) <= room else "length",
        )

    async def parse(
        self, text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]
    ) -> ParsedAnswer:
        """Return all of `text` as content."""
        return ParsedAnswer(reasoning="", content=text, tool_calls=[], malformed=False)

    async def stage(self, offer: Offer) -> None:
        """Record the version; there are no weights to receive."""
        self._staged_version = offer.manifest.policy_version

    async def commit(self, policy_version: int) -> float:
        """Switch to `policy_version` for tokens due from now on, without a pause. Raises ValueError unless staged."""
        if policy_version != self._staged_version:
            raise ValueError(
                f"commit of version {policy_version}, but staged is {self._staged_version}: stage it first"
            )
        self._staged_version = None
        self._versions.append(policy_version)
        self._served.change(policy_version)
        self._commit_times_s.append(asyncio.get_running_loop().time())
        return 0.0

    def leave_broadcasts(self) -> None:
        """Do nothing: there are no broadcasts."""

    def load(self) -> EngineLoad:
        """The current load; there is no KV cache. Raises EngineDied after `close`."""
        if self._closed:
            raise EngineDied("the engine is closed")
        return EngineLoad(num_running=len(self._running), kv_use=0.0, generated_tokens=self._generated_tokens)

    async def close(self) -> None:
        """End every generation with EngineDied. Idempotent."""
        self._closed = True
        for due in self._running:
            if not due.done():
                due.set_exception(EngineDied("the engine is closed"))

    async def _until(self, deadline_s: float) -> None:
        # A timer at an absolute time: a sleep would add the delay of the loop.
        loop = asyncio.get_running_loop()
        due: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(deadline_s, _wake, due)
        self._running.add(due)
        try:
            await due
        finally:
            timer.cancel()
            self._running.remove(due)

    def _spans(self, started_s: float, num_tokens: int) -> list[VersionSpan]:
        """The version of each token: the one that served when the token was due."""

        def due_s(index: int) -> float:
            return started_s + self._schedule.due_s(index + 1)

        first = bisect_right(self._commit_times_s, started_s)
        cuts = [bisect_left(range(num_tokens), commit_s, key=due_s) for commit_s in self._commit_times_s[first:]]
        return [
            VersionSpan(start=start, stop=stop, policy_version=version)
            for (start, stop), version in zip(pairwise([0, *cuts, num_tokens]), self._versions[first:], strict=True)
            if start < stop
        ]


def _wake(due: asyncio.Future[None]) -> None:
    if not due.done():
        due.set_result(None)
