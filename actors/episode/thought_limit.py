"""Closes a thought that is too long: `sampling.max_thought_tokens`.

The policy writes at most that many tokens of a thought. Then the mark that closes it is put after them, and the policy
continues with its answer. The tokens of the mark are recorded with a kept set of one token each: their probability is
1, for the actor and for the learner, so they teach nothing.
"""

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, Sampler
from slipstream.actors.episode.allowance import Allowance
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.common.text.codec import CONTEXT_TOKENS, decoder, encoder, following
from slipstream.common.text.thought import open_thought, thought_marks

OTHER_SEED = 1 << 61  # of the rest: with one seed it would have the random numbers of the beginning


class ThoughtLimit(Sampler):
    """Generates as `sampler` does, but no longer thoughts than `allowance` has."""

    def __init__(self, sampler: Sampler, tokenizer: PreTrainedTokenizerBase, allowance: Allowance) -> None:
        self._sampler, self._marks = sampler, thought_marks(tokenizer)
        self._encode, self._decode = encoder(tokenizer), decoder(tokenizer)
        self._max_thought_tokens, self._max_tokens = allowance.max_thought_tokens, allowance.max_tokens

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Continue `tokens`; a thought that began within these, or with the reply, is closed. Raises as the sampler."""
        room = min(sampling.max_turn_tokens, self._max_tokens - len(tokens))
        if room <= self._max_thought_tokens:
            return await self._sampler.generate(tokens, sampling, seed=seed)
        first = msgspec.structs.replace(sampling, max_turn_tokens=self._max_thought_tokens)
        found = await self._sampler.generate(tokens, first, seed=seed)
        if found.finish_reason != "length":
            return found
        mark = self._closing(found.tokens, prompt=tokens)
        found = found.then(_forced(mark, policy_version=found.version_spans[-1].policy_version))
        if len(found.tokens) >= room:  # the mark would take the place of the answer
            return found.first(room, finish_reason="length")
        rest = msgspec.structs.replace(sampling, max_turn_tokens=room - len(found.tokens))
        more = await self._sampler.generate(
            [*tokens, *found.tokens], rest, seed=None if seed is None else seed ^ OTHER_SEED
        )
        return found.then(more)

    def _closing(self, written: list[int], *, prompt: list[int]) -> list[int]:
        """The tokens that close the thought in which `written` is at its end; none if it is in none."""
        reply, tail = self._decode(written), self._decode(prompt[-CONTEXT_TOKENS:])
        mark = open_thought(reply, prompt=tail, marks=self._marks)
        if mark in reply:
            return []
        tokens = following(self._encode, mark, after=tail + reply)
        if len(tokens) > 1:  # the policy may have written the first of them itself
            begun = next(count for count in range(len(mark), -1, -1) if reply.endswith(mark[:count]))
            return following(self._encode, mark[begun:], after=tail + reply)
        return tokens


def _forced(tokens: list[int], *, policy_version: int) -> Completion:
    """Tokens that nothing else could have been."""
    return Completion(
        tokens=tokens,
        logprobs=[0.0] * len(tokens),
        kept=kept_sets([[token] for token in tokens]),
        version_spans=[VersionSpan(start=0, stop=len(tokens), policy_version=policy_version)] if tokens else [],
        finish_reason="length",
    )
