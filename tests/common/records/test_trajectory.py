"""A trajectory holds together, or is refused with the contradiction named; what is encoded comes back equal."""

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.common.process.wire import WireError, encode
from slipstream.common.records.kept_sets import kept_sets, no_sets
from slipstream.common.records.trajectory import (
    InvalidTrajectory,
    Outcome,
    StopReason,
    Trajectory,
    VersionSpan,
    check,
    decode_trajectory,
    pack_logprobs,
    pack_mask,
    pack_tokens,
)
from tests.replay.records.attempts import attempt_at, lease_of, ticket, turn

VOCAB_SIZE = 100
NAN = float("nan")
a_turn = partial(turn, state="a state", rewards={"task": 0.0, "format": 0.25})


def a_span(start: int, stop: int, policy_version: int) -> VersionSpan:
    return VersionSpan(start=start, stop=stop, policy_version=policy_version)


FIRST, LAST_SPAN = a_turn(2, 5), a_span(7, 10, 4)
# Ten tokens: a prompt of two, three sampled by versions 3 and 4, a prompt of two, three more sampled by version 4.
WHOLE: Trajectory = msgspec.structs.replace(
    attempt_at(lease_of(ticket(0)), 0, run_id="run"),
    tokens=pack_tokens([5, 6, 20, 21, 99, 7, 8, 22, 23, 0]),
    behaviour_logprobs=pack_logprobs([0, 0, -0.5, -1.5, -0.25, 0, 0, -2, 0, -0.125]),
    loss_mask=pack_mask([False, False, True, True, True, False, False, True, True, True]),
    turns=[FIRST, a_turn(7, 10, rewards={"task": 1.0, "format": 0.25})],
    version_spans=[a_span(2, 4, 3), a_span(4, 5, 4), LAST_SPAN],
)
KEPT = kept_sets([[20], [21, 3], [99, 1, 2], [22], [50, 23], [0, 1]])
CUT = msgspec.structs.replace(WHOLE.sampling, top_p=0.9, top_k=5)
CUT_OFF: Trajectory = msgspec.structs.replace(WHOLE, sampling=CUT, kept=KEPT)
GREEDY: Trajectory = msgspec.structs.replace(WHOLE, sampling=msgspec.structs.replace(CUT, temperature=0.0))


def test_the_arrays_read_back_as_they_were_packed_and_the_return_is_every_component_of_every_turn() -> None:
    assert WHOLE.num_tokens == 10
    assert WHOLE.token_array().tolist() == [5, 6, 20, 21, 99, 7, 8, 22, 23, 0]
    assert WHOLE.behaviour_logprob_array().tolist() == [0, 0, -0.5, -1.5, -0.25, 0, 0, -2, 0, -0.125]
    assert np.flatnonzero(WHOLE.loss_mask_array()).tolist() == [2, 3, 4, 7, 8, 9]
    assert (WHOLE.oldest_policy_version, WHOLE.newest_policy_version, WHOLE.total_reward) == (3, 4, 1.5)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("whole", [WHOLE, CUT_OFF, GREEDY], ids=["whole", "with kept sets", "greedy"])
def test_a_whole_trajectory_passes_and_comes_back_equal_from_its_frame(whole: Trajectory, compress: bool) -> None:
    assert decode_trajectory(encode(whole, compress=compress), max_bytes=1 << 16, vocab_size=VOCAB_SIZE) == whole


def test_a_trajectory_that_contradicts_itself_does_not_come_off_the_wire() -> None:
    frame = encode(msgspec.structs.replace(WHOLE, score=1.5))
    with pytest.raises(InvalidTrajectory, match=r"score 1\.5"):
        decode_trajectory(frame, max_bytes=1 << 16, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("field", Trajectory.__struct_fields__)
def test_no_field_may_be_missing_on_the_wire(field: str) -> None:
    without = {name: value for name, value in msgspec.structs.asdict(WHOLE).items() if name != field}
    other = msgspec.defstruct("Other", [(name, Any) for name in without])
    with pytest.raises(WireError, match=f"missing required field `{field}`"):
        decode_trajectory(encode(other(**without)), max_bytes=1 << 16, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        # The arrays.
        ({"schema": 1}, "schema is 1, expected 5"),
        ({"tokens": b""}, "tokens have 0 bytes, expected a positive multiple of 4"),
        ({"tokens": WHOLE.tokens[:-1]}, "tokens have 39 bytes"),
        ({"tokens": WHOLE.tokens[:-4]}, "10 behaviour_logprobs for 9 tokens"),
        ({"tokens": pack_tokens([5, 6, 20, 21, 100, 7, 8, 22, 23, 0])}, r"in \[0, 100\], vocabulary is \[0, 100\)"),
        ({"tokens": pack_tokens([5, 6, 20, 21, -1, 7, 8, 22, 23, 0])}, r"in \[-1, 23\]"),
        ({"behaviour_logprobs": WHOLE.behaviour_logprobs[:-4]}, "9 behaviour_logprobs for 10 tokens"),
        ({"loss_mask": WHOLE.loss_mask[:-1]}, "loss_mask of 1 bytes for 10 tokens"),
        ({"branch_starts": []}, r"branch_starts \[\] do not divide 10 tokens"),
        ({"branch_starts": [0, 5, 5]}, "do not divide"),
        ({"branch_starts": [0, 10]}, "do not divide"),
        ({"branch_starts": [0, 4]}, r"branch_starts \[0, 4\] point to a sampled token, not to a prompt"),
        # The numbers.
        ({"behaviour_logprobs": pack_logprobs([0, 0, NAN, -1, -1, 0, 0, -1, -1, -1])}, "not finite, or above 0"),
        ({"behaviour_logprobs": pack_logprobs([0, 0, 0.5, -1, -1, 0, 0, -1, -1, -1])}, "not finite, or above 0"),
        ({"score": 1.01}, r"score 1.01 is outside \[0, 1\]"),
        ({"score": NAN}, "score nan"),
        ({"turns": [FIRST, a_turn(7, 10, rewards={"task": NAN})]}, "a value that is not finite"),
        ({"turns": [FIRST, a_turn(7, 10, rewards={"a": 1.7e308, "b": 1.7e308})]}, r"beyond 1e\+12"),
        ({"outcome": Outcome.ENV_FAILURE}, "DONE cannot have outcome"),
        ({"stop_reason": StopReason.ENV_ERROR}, "ENV_ERROR cannot have outcome"),
        # The turns.
        ({"turns": []}, "no turns: nothing was sampled"),
        ({"turns": [FIRST, a_turn(7, 10, rewards={})]}, r"n \[7, 10\) has no reward; a reward of 0 must be given too"),
        ({"turns": [FIRST, a_turn(4, 10)]}, r"turn \[4, 10\) overlaps another"),
        ({"turns": [FIRST, a_turn(7, 11)]}, r"turn \[7, 11\) overlaps another turn or exceeds the tokens"),
        ({"turns": [FIRST, a_turn(7, 7)]}, r"turn \[7, 7\)"),
        ({"turns": [a_turn(-3, 5), a_turn(7, 10)]}, r"turn \[-3, 5\)"),
        ({"turns": [a_turn(2, 5)]}, "loss_mask marks 6 tokens, the turns sampled 3"),
        ({"turns": [FIRST, msgspec.structs.replace(a_turn(7, 10), state_key="x" * 257)]}, "257 characters"),
        # What was kept.
        ({"sampling": CUT}, r"^no kept sets, but the sampling was Sampling\(temperature=1.0, top_p=0.9, top_k=5"),
        ({"sampling": CUT, "kept": no_sets(6)}, "kept sets of 0 to 0 tokens, expected 1 to"),
        ({"kept": kept_sets([[20], [], [98], [], [], []])}, "a sampled token is not in its kept set"),
        ({"sampling": CUT, "kept": KEPT.between(0, 5)}, "5 kept sets for 6 sampled tokens"),
        # The mask, and what else must agree with it.
        ({"loss_mask": pack_mask([True] * 10)}, "loss_mask marks 10 tokens, the turns sampled 6"),
        ({"loss_mask": pack_mask([place in (1, 2, 3, 7, 8, 9) for place in range(10)])}, "loss_mask marks 6"),
        ({"behaviour_logprobs": pack_logprobs([0, -1, -1, -1, -1, 0, 0, -1, -1, -1])}, "not 0 on tokens that were not"),
        # The versions.
        ({"version_spans": []}, "version_spans do not cover exactly the sampled tokens"),
        ({"version_spans": [a_span(2, 4, 3), LAST_SPAN]}, "do not cover"),
        ({"version_spans": [a_span(2, 5, 3), a_span(4, 5, 4), LAST_SPAN]}, r"version span \[4, 5\) overlaps another"),
        ({"version_spans": [a_span(2, 5, -1), LAST_SPAN]}, r"a version that is not in \[0, 2147483647\]"),
        ({"version_spans": [a_span(2, 5, 1 << 31), LAST_SPAN]}, "a version that is not in"),
        ({"version_spans": [a_span(2, 5, 3), a_span(7, 11, 4)]}, r"\[7, 11\) overlaps another version span or exceeds"),
    ],
)
def test_a_contradiction_is_refused_and_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidTrajectory, match=complaint):
        check(msgspec.structs.replace(WHOLE, **changes), vocab_size=VOCAB_SIZE)
