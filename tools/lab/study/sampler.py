"""Inference in this process, for studies: it samples many concurrent episodes with exactly given weights.

Episodes run in lockstep: when all of them wait for their next turn, the turns are sampled as one batch, and then the
environments answer. The keys and values of an episode stay in its slot between turns, so that only new tokens are read.
It works with any causal LM of transformers; only its attention is replaced, as in the learner. It is meant for models
of a few layers, for which an engine in its own process would cost more than the model.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from slipstream.actors.engine.engine import Completion, Restriction, Sampler
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.text.tokenizer import absent_ids
from slipstream.tools.lab.study.slots import Reading, choose, empty_slots, slot_attention

SLOT_ATTENTION = "slipstream_slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A turn that an episode waits for."""

    slot: int
    tokens: list[int]
    num_read: int  # of `tokens`, whose keys and values are in the slot
    sampling: Sampling
    seed: int | None
    batch: "asyncio.Future[_Batch]"  # the batch that the turn is sampled in


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Turns that are sampled together, by the first of the waiting episodes that continues."""

    requests: list[_Request]
    completions: dict[int, Completion] = field(default_factory=dict)  # by slot


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Tokens that a slot has not read yet, beginning at position `start`."""

    slot: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """The tokens that were sampled for a request so far."""

    request: _Request
    room: int  # tokens
    chances: list[float]  # random numbers in [0, 1), one per token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def last_piece(self) -> _Piece:
        """The token that was sampled last; it must be read before the next one can be sampled."""
        start = len(self.request.tokens) + len(self.tokens) - 1
        return _Piece(slot=self.request.slot, start=start, tokens=self.tokens[-1:])


class LockstepSampler:
    """Samples the turns of all seated episodes as one batch, with the weights of the last `load`."""

    def __init__(self, folder: str | Path, *, num_slots: int, max_tokens: int, end_token: int) -> None:
        AttentionInterface.register(SLOT_ATTENTION, slot_attention)
        lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=SLOT_ATTENTION, trust_remote_code=False
        )
        self._lm = lm.eval()
        self._absent = torch.tensor(absent_ids(folder, lm.config.vocab_size), dtype=torch.long)
        self._slots = empty_slots(
            num_slots,
            num_layers=lm.config.num_hidden_layers,
            kv_heads=lm.config.num_key_value_heads,
            max_tokens=max_tokens,
            head_dim=lm.config.head_dim,
        )
        self.num_slots, self._max_tokens, self._end_token = num_slots, max_tokens, end_token
        self._free = list(reversed(range(num_slots)))
        self._waiting: list[_Request] = []
        self._policy_version = 0

    def load(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Sample with these weights from now on. Raises ValueError during an episode: its slot has the old ones'."""
        if len(self._free) < self.num_slots:
            raise ValueError(f"{self.num_slots - len(self._free)} episodes are running; load between episodes")
        with torch.no_grad():
            for name, parameter in self._lm.named_parameters():
                parameter.copy_(weights[name])
        self._policy_version = policy_version

    @contextlib.contextmanager
    def seat(self) -> Iterator[Sampler]:
        """Yield the sampler of one episode. Raises ValueError if every slot is taken."""
        if not self._free:
            raise ValueError(f"all {self.num_slots} slots are taken; run fewer concurrent episodes")
        slot = self._free.pop()
        try:
            yield _Seat(self, slot)
        finally:
            self._free.append(slot)
            self._check_soon()

    async def turn(self, request: _Request) -> Completion:
        """Sample `request` in the next batch. Raises ValueError for a prompt that fills the context."""
        if len(request.tokens) >= self._max_tokens:
            raise ValueError(f"a prompt of {len(request.tokens)} tokens leaves no room in {self._max_tokens}")
        self._waiting.append(request)
        self._check_soon()
        batch = await request.batch
        if not batch.completions:
            batch.completions.update(self._sampled(batch.requests))
        return batch.completions[request.slot]

    def _check_soon(self) -> None:
        """Check after all other ready tasks: episodes that begin together all take a seat before the first batch."""
        asyncio.get_running_loop().call_soon(self._begin_if_all_wait)

    def _begin_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self.num_slots - len(self._free):
            return
        batch = _Batch(requests=self._waiting)
        self._waiting = []
        for request in batch.requests:
            request.batch.set_result(batch)

    @torch.inference_mode()
    def _sampled(self, requests: list[_Request]) -> dict[int, Completion]:
        """Sample all requests; return the turn of each slot."""
        turns = [self._begun(request) for request in requests]
        new = [_Piece(slot=each.slot, start=each.num_read, tokens=each.tokens[each.num_read :]) for each in requests]
        running = turns
        while running:
            self._draw(running, self._read(new))
            running = [turn for turn in running if turn.tokens[-1] != self._end_token and len(turn.tokens) < turn.room]
            new = [turn.last_piece() for turn in running]
        return {turn.request.slot: self._completion(turn) for turn in turns}

    def _begun(self, request: _Request) -> _Turn:
        room = min(request.sampling.max_turn_tokens, self._max_tokens - len(request.tokens))
        return _Turn(request=request, room=room, chances=np.random.default_rng(request.seed).random(room).tolist())

    def _completion(self, turn: _Turn) -> Completion:
        return Completion(
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            version_spans=[VersionSpan(start=0, stop=len(turn.tokens), policy_version=self._policy_version)],
            finish_reason="stop" if turn.tokens[-1] == self._end_token else "length",
            kept=None,
        )

    def _read(self, pieces: list[_Piece]) -> Float[Tensor, "pieces hidden"]:
        """Read each piece into its slot; return the hidden state at its last token."""
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens])
        reading = Reading(
            self._slots,
            slot_ids=[piece.slot for piece in pieces],
            starts=[piece.start for piece in pieces],
            lengths=[len(piece.tokens) for piece in pieces],
        )
        # As one row, without a mask or a cache of transformers: the attention function does both.
        hidden: Tensor = self._lm.get_decoder()(
            input_ids=tokens[None],
            position_ids=reading.positions[None],
            attention_mask=None,
            use_cache=False,
            reading=reading,
        ).last_hidden_state[0, reading.last]
        return hidden

    def _draw(self, turns: list[_Turn], hidden: Float[Tensor, "turns hidden"]) -> None:
        """Sample the next token of each turn."""
        temperatures = torch.tensor([turn.request.sampling.temperature for turn in turns])
        chances = torch.tensor([turn.chances[len(turn.tokens)] for turn in turns], dtype=torch.float64)
        logits = self._lm.get_output_embeddings()(hidden).index_fill_(1, self._absent, -math.inf)
        chosen = choose(logits / temperatures[:, None], chances)
        for turn, token, logprob in zip(turns, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True):
            turn.tokens.append(token)
            turn.logprobs.append(logprob)


class _Seat:
    """One episode's `slipstream.actors.engine.engine.Sampler`."""

    def __init__(self, sampler: LockstepSampler, slot: int) -> None:
        self._sampler, self._slot = sampler, slot
        self._read: list[int] = []  # the tokens whose keys and values are in the slot

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, seed: int | None = None, restriction: Restriction | None = None
    ) -> Completion:
        """Continue `tokens`. Raises ValueError for a prompt without room, and for anything but plain sampling."""
        if sampling.temperature <= 0 or sampling.is_cut or restriction is not None:
            raise ValueError(
                "the sampler of studies needs temperature > 0, top_p 1, top_k 0 and no restriction, got "
                f"{sampling}, {restriction}"
            )
        continues = len(self._read) < len(tokens) and tokens[: len(self._read)] == self._read
        request = _Request(
            slot=self._slot,
            tokens=tokens,
            num_read=len(self._read) if continues else 0,
            sampling=sampling,
            seed=seed,
            batch=asyncio.get_running_loop().create_future(),
        )
        sampled = await self._sampler.turn(request)
        self._read = tokens + sampled.tokens[:-1]  # the last token was sampled, but not read yet
        return sampled
