"""Computes lag: the number of optimizer steps between two policy versions.

Each version is one step after the version before it, with one exception. The first version of a resumed learner has the
weights of its checkpoint, and a number above all published versions.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

VersionArray = npt.NDArray[np.int32]


class Resumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A learner resumed from a checkpoint: the two versions have the same weights."""

    checkpoint_version: int
    first_version: int  # of the resumed learner; larger


def lags(versions: VersionArray, *, policy_version: int, resumptions: Sequence[Resumption]) -> VersionArray:
    """The number of optimizer steps that the learner at `policy_version` has made since each of `versions`.

    `resumptions` are all resumptions before that version, in order. The steps between a checkpoint and a resumption are
    lost, so their versions count like the checkpoint's.

        lag = steps(policy_version) - steps(version)
        steps(v) = v - sum over resumptions of clip(v - checkpoint_version, 0, first_version - checkpoint_version)

    >>> resumption = Resumption(checkpoint_version=5, first_version=10)
    >>> lags(np.array([4, 5, 7, 10, 11], np.int32), policy_version=12, resumptions=[resumption]).tolist()
    [3, 2, 2, 2, 1]
    """
    at = np.array([policy_version], dtype=np.int32)
    return _steps(at, resumptions) - _steps(versions, resumptions)


def oldest_within(max_lag: int, *, policy_version: int, resumptions: Sequence[Resumption]) -> int:
    """The lowest version with a lag of at most `max_lag`; negative if every version has such a lag.

    >>> resumption = Resumption(checkpoint_version=5, first_version=10)
    >>> [oldest_within(max_lag, policy_version=12, resumptions=[resumption]) for max_lag in (0, 1, 2, 3)]
    [12, 11, 5, 4]
    """
    oldest = policy_version - max_lag
    for resumption in reversed(resumptions):
        if oldest > resumption.first_version:
            break
        oldest -= resumption.first_version - resumption.checkpoint_version
    return oldest


def _steps(versions: VersionArray, resumptions: Sequence[Resumption]) -> VersionArray:
    """The optimizer steps from version 0 to each version, without lost steps."""
    steps = versions.copy()
    for resumption in resumptions:
        lost = resumption.first_version - resumption.checkpoint_version
        steps -= np.clip(versions - resumption.checkpoint_version, 0, lost).astype(np.int32)
    return steps
