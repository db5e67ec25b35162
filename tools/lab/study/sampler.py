"""Inference in this process, for studies: it samples many concurrent episodes with exactly given weights.

Episodes run in lockstep: when all of them wait for their next turn, the turns are sampled as one batch, and then the
environments answer. It is meant for models of a few layers, for which an engine in its own process would cost more than
the model: a Qwen3 of the quickstart's size.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.actors.engine.engine import Completion, Sampler
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.text.tokenizer import absent_ids
from slipstream.tools.lab.study.cached_qwen3 import CachedQwen3


@dataclass(kw_only=True, slots=True)
class _Turn:
    """A turn that an episode waits for, and what has been sampled of it so far."""

    row: int  # of the cache
    prompt: list[int]
    temperature: float
    chances: list[float]  # random numbers in [0, 1), one for each token that there is room for
    batch: "asyncio.Future[list[_Turn]]"  # the turns that are sampled together, by the first that continues
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """One token per row."""

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]


def choose(logits: Float[Tensor, "rows vocab"], chances: Float[Tensor, " rows"]) -> Chosen:
    """Choose the token of each row whose interval contains the row's chance; softmax(logits) divides [0, 1) in order.

    With logits (0, ln 3), the parts are [0, 1/4) and [1/4, 1): chances 0.2 and 0.3 choose tokens 0 and 1.
    """
    logprobs = logits.log_softmax(dim=-1)
    ends = logprobs.double().exp().cumsum(dim=-1)
    tokens = torch.searchsorted(ends, chances[:, None] * ends[:, -1:], right=True)
    return Chosen(tokens=tokens.squeeze(1), logprobs=logprobs.gather(1, tokens).squeeze(1))


class LockstepSampler:
    """Samples the turns of all seated episodes as one batch, with the weights of the last `load`."""

    def __init__(self, folder: str | Path, *, num_slots: int, max_tokens: int, end_token: int) -> None:
        self._lm = CachedQwen3(folder, num_rows=num_slots, max_tokens=max_tokens)
        self._absent = torch.tensor(absent_ids(folder, self._lm.config.vocab_size), dtype=torch.long)
        self.num_slots, self._max_tokens, self._end_token = num_slots, max_tokens, end_token
        self._free = list(range(num_slots))  # rows of the cache
        self._cached: dict[int, list[int]] = {}  # the tokens of each row that an episode has
        self._waiting: list[_Turn] = []
        self._policy_version = 0

    def load(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Sample with these weights from now on. Raises ValueError during an episode."""
        if self._cached:
            raise ValueError(f"{len(self._cached)} episodes are running; load between episodes")
        self._lm.load(weights)
        self._policy_version = policy_version

    @contextlib.contextmanager
    def seat(self) -> Iterator[Sampler]:
        """Yield the sampler of one episode. Raises ValueError if every slot is taken."""
        if not self._free:
            raise ValueError(f"all {self.num_slots} slots are taken; run fewer concurrent episodes")
        row = self._free.pop()
        self._cached[row] = []
        try:
            yield _Seat(self, row)
        finally:
            del self._cached[row]
            self._free.append(row)
            self._check_soon()

    async def generate(self, row: int, tokens: list[int], sampling: Sampling, *, seed: int | None) -> Completion:
        """Continue `tokens`, of which the row has what came before.

        Raises ValueError for a prompt without room, and for anything but plain sampling.
        """
        if sampling.temperature <= 0 or sampling.is_cut:
            raise ValueError(f"the sampler of studies needs temperature > 0, top_p 1 and top_k 0, got {sampling}")
        room = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        if room < 1:
            raise ValueError(f"a prompt of {len(tokens)} tokens leaves no room in {self._max_tokens}")
        turn = _Turn(
            row=row,
            prompt=tokens,
            temperature=sampling.temperature,
            chances=np.random.default_rng(seed).random(room).tolist(),
            batch=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(turn)
        self._check_soon()
        batch = await turn.batch
        if not turn.tokens:
            self._sample(batch)
        return Completion(
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            version_spans=[VersionSpan(start=0, stop=len(turn.tokens), policy_version=self._policy_version)],
            finish_reason="stop" if turn.tokens[-1] == self._end_token else "length",
            kept=None,
        )

    def _check_soon(self) -> None:
        """Check after all other ready tasks: episodes that begin together all take a seat before the first batch."""
        asyncio.get_running_loop().call_soon(self._begin_if_all_wait)

    def _begin_if_all_wait(self) -> None:
        if len(self._waiting) == len(self._cached):
            batch, self._waiting = self._waiting, []
            for turn in batch:
                turn.batch.set_result(batch)

    @torch.inference_mode()
    def _sample(self, turns: list[_Turn]) -> None:
        """Sample all turns, a token of each at a time."""
        while turns:
            logits = self._logits(turns)
            temperatures = torch.tensor([turn.temperature for turn in turns])[:, None]
            chances = torch.tensor([turn.chances[len(turn.tokens)] for turn in turns], dtype=torch.float64)
            chosen = choose(logits.index_fill_(1, self._absent, -math.inf) / temperatures, chances)
            for turn, token, logprob in zip(turns, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True):
                turn.tokens.append(token)
                turn.logprobs.append(logprob)
            turns = [
                turn for turn in turns if turn.tokens[-1] != self._end_token and len(turn.tokens) < len(turn.chances)
            ]

    def _logits(self, turns: list[_Turn]) -> Tensor:
        """After all tokens of each turn. Those that the row has are not computed again, but for the last."""
        starts, parts = list[int](), list[list[int]]()
        for turn in turns:
            text, cached = [*turn.prompt, *turn.tokens], self._cached[turn.row]
            is_continued = text[: len(cached)] == cached  # else the whole text is computed again
            starts.append(min(len(cached), len(text) - 1) if is_continued else 0)
            parts.append(text[starts[-1] :])
            self._cached[turn.row] = text
        widest = max(map(len, parts))
        return self._lm.last_logits(
            torch.tensor([turn.row for turn in turns]),
            torch.tensor([part + [0] * (widest - len(part)) for part in parts]),
            starts=torch.tensor(starts),
            counts=torch.tensor([len(part) for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class _Seat:
    """The sampler of one episode."""

    sampler: LockstepSampler
    row: int

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        return await self.sampler.generate(self.row, tokens, sampling, seed=seed)
