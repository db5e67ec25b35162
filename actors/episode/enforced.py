"""Has the policy choose its action among those that are admissible: `env.enforce_admissible`.

In a format with marks the policy writes freely up to the opening mark, and from there on one of the actions and the
closing mark. Those are two requests to the engine. The tokens of the first have no kept set: each could be any token of
the vocabulary. Those of the second have the tokens that continue an action.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from slipstream.actors.engine.engine import Completion, Restriction, Sampler, widest
from slipstream.actors.episode.actions import Actions
from slipstream.actors.episode.answer import Boundary
from slipstream.actors.episode.episode_record import mixed
from slipstream.common.records.kept_sets import MAX_KEPT_TOKENS
from slipstream.common.records.message import bare
from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.action_format import marks_of
from slipstream.common.text.chat_template import turn_marks
from slipstream.common.text.codec import CONTEXT_TOKENS, decoder, encoder, end_tokens, following
from slipstream.envhub.env import EnvError

MAX_ACTION_TOKENS = 100_000  # of all admissible actions of one state together


class Enforcer(Sampler):
    """Generates the turns of one episode as `sampler` does, each with one of the actions that are possible then."""

    def __init__(self, sampler: Sampler, actions: Actions, *, max_tokens: int) -> None:
        """`max_tokens` is the size of the context. Raises EnvError for a format without marks."""
        marks = marks_of(actions.action_format)
        if marks is None:
            raise EnvError("`env.enforce_admissible` needs an action format with marks, or plain")
        self._sampler, self._actions, self._tokenizer = sampler, actions, actions.chat.tokenizer
        self._max_tokens = max_tokens
        self._encode, self._decode = encoder(self._tokenizer), decoder(self._tokenizer)
        self._ends = end_tokens(self._tokenizer)
        self._opening = marks.opening.rstrip()
        self._gap = marks.opening[len(self._opening) :]  # between the opening mark and the action
        self._closing = marks.closing
        # A word-level tokenizer decodes a mark with spaces in it. Without a mark the action comes at once.
        stops = dict.fromkeys([self._opening, self._decode(self._encode(self._opening)).strip()])
        self._stops = list(stops) if self._opening else []

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, seed: int | None = None, restriction: Restriction | None = None
    ) -> Completion:
        """Continue `tokens`, the last prompt of the conversation. A summary is written freely.

        A turn that ends without an opening mark has no action, and one that is cut off may have a part of one. Raises
        EnvError if an action cannot be written, and the errors of the sampler.
        """
        chat, found = self._actions.chat, NOTHING
        if chat.is_summarising:
            return await self._sampler.generate(tokens, sampling, seed=seed)
        for part in itertools.count():
            left = min(sampling.max_turn_tokens, self._max_tokens - len(tokens)) - len(found.tokens)
            written = self._written(chat.answer_of(self._decode(found.tokens)))
            after = self._decode([*tokens[-CONTEXT_TOKENS:], *found.tokens])
            choices = [] if written is None else self._choices(self._actions.possible, written=written, after=after)
            # The token of the mark may have written a whole action, or one that is not admissible.
            wrote_more = written is not None and not all(choices or [[]])
            if left <= 0 or wrote_more:
                return replace(found, finish_reason="length")
            more = await self._sampler.generate(
                [*tokens, *found.tokens],
                msgspec.structs.replace(sampling, max_turn_tokens=left),
                # One seed for all parts of a turn would give them the same random numbers.
                seed=mixed(seed, part) if part and seed is not None else seed,
                restriction=Restriction(choices=choices, stops=[] if choices else self._stops),
            )
            found = found.then(more)
            if choices or more.finish_reason == "length" or more.tokens[-1] in self._ends:
                break
        return found

    def _written(self, answer: str) -> str | None:
        """What of an action is in `answer`; None before the opening mark."""
        for stop in self._stops:
            _, mark, after = answer.partition(stop)
            if mark:
                return after
        return None if self._stops else ""

    def _choices(self, actions: Sequence[str], *, written: str, after: str) -> list[list[int]]:
        """The tokens of each action and of the closing mark, without what is `written` of them at the end of `after`.

        Raises EnvError if an action would be read as another one, or if there are too many.
        """
        with Boundary():  # a tokenizer refuses half a surrogate pair, and a format may be the user's
            found = self._sequences(actions, written=written, after=after)
        num_tokens = sum(map(len, found))
        if num_tokens > MAX_ACTION_TOKENS or (found and widest(found, ends=self._ends) >= MAX_KEPT_TOKENS):
            raise EnvError(
                f"`env.enforce_admissible`: {len(found)} admissible actions of {num_tokens} tokens are too many; at "
                f"most {MAX_KEPT_TOKENS - 1} may begin with different tokens, and they may have {MAX_ACTION_TOKENS} "
                "together"
            )
        return found

    def _sequences(self, actions: Sequence[str], *, written: str, after: str) -> list[list[int]]:
        found, opening = list[list[int]](), self._encode(self._opening)
        for action in dict.fromkeys(actions):
            text = f"{self._gap}{action}{self._closing}"
            if written and not written.strip():
                text = written + text.lstrip()  # white space after the mark does not matter
            if not text.startswith(written):
                continue
            rest = turn_marks(self._tokenizer).split_reply(text.removeprefix(written))
            tokens = following(self._encode, rest, after=after)
            whole = f"{self._opening}{written}{self._decode(tokens)}" if written else self._decode(opening + tokens)
            read = self._actions.action_format.parse(whole).text
            if bare(action) and bare(read) == bare(action) and not self._ends.intersection(tokens):
                found.append(tokens)
            elif not written:
                raise EnvError(
                    f"`env.enforce_admissible`: the admissible action {action!r:.100} is read as {read!r:.100}; the "
                    "tokenizer or `env.action_format` cannot write it"
                )
        return found


NOTHING = Completion(tokens=[], logprobs=[], kept=None, version_spans=[], finish_reason="length")
