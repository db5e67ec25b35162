"""What a step did with its sampled tokens: the advantage, the importance ratio and the fate of each.

    tokens/step_000012.rank_0.bin     one frame, of the sequences that this rank computed

It is for people: nothing is trained from it. The archive has the tokens themselves.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from slipstream.common.process.output import whole_file
from slipstream.common.process.wire import MAX_FRAME_BYTES, WireError, decode, encode

TRAINED, CLIPPED, LEFT_OUT = 0, 1, 2  # fates; clipped: the surrogate's bound holds; left out: by a mask, or as too old

Count = Annotated[int, msgspec.Meta(ge=0)]


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampled tokens of one branch of a trajectory, in order."""

    group_id: int
    member: int
    first: Count  # the number of its first token among the sampled tokens of the trajectory
    advantages: bytes  # float16
    ratios: bytes  # float16: current over behaviour probability at the step, before any cut
    fates: bytes  # uint8


class StepTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part of a step."""

    policy_version: int  # that the step began with; no two attempts at a step have the same
    sequences: list[SequenceTokens]


def write_tokens(folder: Path, tokens: StepTokens, *, step: int, rank: int) -> None:
    """Write a rank's part of `step`, in place of an earlier attempt's. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / f"step_{step:06d}.rank_{rank}.bin") as file:
        file.write(encode(tokens, compress=True))


def read_tokens(
    folder: Path, *, step: int, policy_version: int | None
) -> Mapping[tuple[int, int], Sequence[SequenceTokens]]:
    """The sequences of the attempt at `step` that began with `policy_version`, by group and member.

    Raises WireError if a file is damaged, OSError if it cannot be read.
    """
    found = defaultdict[tuple[int, int], list[SequenceTokens]](list)
    for path in sorted(folder.glob(f"step_{step:06d}.rank_*.bin")):
        if path.stat().st_size > MAX_FRAME_BYTES:
            raise WireError(f"{path} has {path.stat().st_size} bytes, the limit is {MAX_FRAME_BYTES}")
        try:
            part = decode(StepTokens, path.read_bytes())
        except WireError as error:
            raise WireError(f"{path} is damaged: {error}") from error
        for sequence in part.sequences if part.policy_version == policy_version else ():
            if not len(sequence.advantages) == len(sequence.ratios) == 2 * len(sequence.fates):
                raise WireError(f"{path} is damaged: group {sequence.group_id} has parts of different lengths")
            found[sequence.group_id, sequence.member].append(sequence)
    return found
