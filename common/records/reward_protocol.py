"""The messages between the server of a reward model and its clients: tokens of an episode in, values of its turns out.

    GET  /v1/model     a `RewardModelCard`
    POST /v1/values    a `ValuesRequest`, answered by `ValuesReply`

Each body is one MessagePack struct. A refusal has a status of 400 to 499 and a text that says why.
"""

from typing import Annotated, Final, Literal, Self

import msgspec
import numpy as np

from slipstream.common.records.trajectory import MAX_TURNS, TokenArray, Trajectory, check_tokens

MAX_REQUEST_BYTES = 16 << 20
MAX_REPLY_BYTES = 10 * MAX_TURNS + 1024
SECRET_VARIABLE = "SLIPSTREAM_REWARDS_KEY"  # the environment variable with the key that a server may require
# What the values of a model mean; the label in its config.json.
OUTCOME: Final = "reward"
PROCESS: Final = "process_reward"
RETURN: Final = "return"  # of a critic: the expected return of the whole episode
RETURN_TO_GO: Final = "return_to_go"  # of a critic: the expected return of the turns to come
Kind = Literal["reward", "process_reward", "return", "return_to_go"]
CRITICS: Final[tuple[Kind, ...]] = (RETURN, RETURN_TO_GO)
KINDS: Final[tuple[Kind, ...]] = (OUTCOME, PROCESS, *CRITICS)

Places = Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_TURNS)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ScoredEpisode(_Message, frozen=True, kw_only=True):
    """What a reward model reads of an episode, finished or not."""

    tokens: bytes  # int32, little-endian
    turn_stops: Places  # where each turn ends; for a critic, where the prompt before a turn ends
    branch_starts: Places  # where each token sequence begins

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        return cls(
            tokens=trajectory.tokens,
            turn_stops=[turn.stop for turn in trajectory.turns],
            branch_starts=trajectory.branch_starts,
        )

    @classmethod
    def of_state(cls, partial: Trajectory) -> Self:
        """What a critic reads of an unfinished episode: all of it, up to where the next turn begins.

        A critic's value belongs to the state in which a token is sampled, so it is read after the environment's answer.
        """
        return cls(tokens=partial.tokens, turn_stops=[partial.num_tokens], branch_starts=partial.branch_starts)

    def token_array(self) -> TokenArray:
        return np.frombuffer(self.tokens, dtype="<i4")

    def check(self, *, vocab_size: int, max_tokens: int) -> None:
        """Raise ValueError unless all parts agree, and each sequence has at most `max_tokens` tokens."""
        check_tokens(self.tokens, self.branch_starts, vocab_size=vocab_size)
        num_tokens, starts, stops = len(self.tokens) // 4, self.branch_starts, self.turn_stops
        if stops != sorted(set(stops)) or not 0 < stops[0] <= stops[-1] <= num_tokens:
            raise ValueError(f"turn_stops {stops[:10]} are not in order, or not in (0, {num_tokens}]")
        if {stop - 1 for stop in stops} & set(starts):
            raise ValueError("a turn ends at the first token of a sequence, so it has no prompt")
        longest = int(np.diff([*starts, num_tokens]).max())
        if longest > max_tokens:
            raise ValueError(f"a sequence has {longest} tokens, and the server reads {max_tokens} (model.max_tokens)")


class ValuesRequest(_Message, frozen=True, kw_only=True):
    """One episode."""

    reads: str  # `slipstream.common.text.tokenizer.text_root` of the client's tokenizer
    episode: ScoredEpisode


class ValuesReply(_Message, frozen=True, kw_only=True):
    """The values of an episode."""

    values: list[float]  # one for each of `turn_stops`, by `kind`; of a model of outcome, one score
    kind: Kind
    model: str  # changes with the weights


class RewardModelCard(_Message, frozen=True, kw_only=True):
    """The model of a server."""

    kind: Kind
    model: str  # changes with the weights
    reads: str  # `slipstream.common.text.tokenizer.text_root` of its tokenizer
    max_tokens: int  # of the longest sequence that the server reads
