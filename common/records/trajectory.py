"""The record of one attempt at one task: the prompts, the sampled tokens, the policy versions and the rewards.

One alignment rule: element i of every per-token array belongs to `tokens[i]`. Arrays are raw little-endian bytes, about
9 bytes for each token. So a record of 4,096 tokens is encoded in microseconds, and `numpy` reads it without a copy.
"""

import enum
import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.common.process.wire import SCHEMA, decode
from slipstream.common.records.kept_sets import KeptSets
from slipstream.common.records.version_lag import VersionArray

MAX_TRAJECTORY_BYTES = 8 << 20  # of an encoded trajectory; larger ones are refused
MAX_POLICY_VERSION = 2**31 - 1  # this limit and the next ones bound the memory that a hostile record can cost
MAX_TURNS = 1 << 12  # also of branches
MAX_SPANS = 1 << 14
MAX_REWARDS = 64  # named components of one turn
MAX_STATE_KEY = 256  # characters; longer keys are recorded as their digest
MAX_REWARD = 1e12  # far above any meaningful reward, and sums of such rewards stay finite

TokenArray = npt.NDArray[np.int32]
LogprobArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.bool_]


class InvalidTrajectory(ValueError):
    """A trajectory whose parts contradict each other; the message names them."""


class StopReason(enum.Enum):
    """Why an episode ended."""

    DONE = "done"
    """The environment ended it."""
    MAX_TURNS = "max_turns"
    """All turns that the task allows were used."""
    MAX_TOKENS = "max_tokens"
    """The next prompt would not fit into the context."""
    TIME_LIMIT = "time_limit"
    """The episode took longer than its time limit."""
    ENV_ERROR = "env_error"
    """The environment raised an error, hung or gave a malformed answer."""
    INFRA_ERROR = "infra_error"
    """The engine, the network or the host failed."""
    PREEMPTED = "preempted"
    """The actor was asked to leave. If there are whole turns, the record is a partial that another actor continues."""
    REPLAY_MISMATCH = "replay_mismatch"
    """A partial's actions led to other observations in a fresh environment, so it cannot be continued."""


class Outcome(enum.Enum):
    """What caused the end. Only POLICY is trained; the others are redone, and never become a reward of 0."""

    POLICY = "policy"
    TRUNCATED = "truncated"
    ENV_FAILURE = "env_failure"
    INFRA_FAILURE = "infra_failure"
    PREEMPTED = "preempted"
    REPLAY_MISMATCH = "replay_mismatch"


OUTCOME_OF = {
    StopReason.DONE: Outcome.POLICY,
    # The policy itself uses up turns and tokens, and writes the actions; the wall clock does not depend on it.
    StopReason.MAX_TURNS: Outcome.POLICY,
    StopReason.MAX_TOKENS: Outcome.POLICY,
    StopReason.TIME_LIMIT: Outcome.TRUNCATED,
    StopReason.ENV_ERROR: Outcome.ENV_FAILURE,
    StopReason.INFRA_ERROR: Outcome.INFRA_FAILURE,
    StopReason.PREEMPTED: Outcome.PREEMPTED,
    StopReason.REPLAY_MISMATCH: Outcome.REPLAY_MISMATCH,
}


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The base of all records; none contains a cycle (`gc=False`). A field that is missing on the wire is an error."""


class Task(_Record, frozen=True, kw_only=True):
    """One problem. The same (env, split, index) is the same problem on every machine."""

    env: str
    split: str  # "train" or "held_out"; their seeds are disjoint
    index: int

    @property
    def task_id(self) -> str:
        return f"{self.env}/{self.split}/{self.index}"


class Sampling(_Record, frozen=True, kw_only=True):
    """The distribution from which tokens are sampled."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)]  # 0 is greedy
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]  # 1 is off
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # 0 is off
    max_turn_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]

    @property
    def is_cut(self) -> bool:
        """Whether top-k or top-p excludes tokens; then the kept set of every sampled token is recorded."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class VersionSpan(_Record, frozen=True, kw_only=True):
    """The version that sampled the tokens [start, stop)."""

    start: int
    stop: int
    policy_version: int


class Turn(_Record, frozen=True, kw_only=True):
    """One generation, tokens [start, stop), and the environment's answer to it."""

    start: int
    stop: int
    # Of the state in which the action was chosen: equal for equal states of one task; "" if unknown.
    state_key: Annotated[str, msgspec.Meta(max_length=MAX_STATE_KEY)]
    # By named component; every turn has at least one, which may be 0.
    rewards: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_REWARDS)]
    finish_reason: str  # "stop" (the policy ended its turn) or "length"
    valid_action: bool  # the text contained an action in the format that the prompt asked for
    generate_s: float
    env_s: float


class Fork(_Record, frozen=True, kw_only=True):
    """Where an attempt leaves a sibling: it begins with the sibling's first turns, token by token."""

    parent: Annotated[int, msgspec.Meta(ge=0, lt=4096)]  # the sibling's member
    num_turns: Annotated[int, msgspec.Meta(ge=1, le=MAX_TURNS)]  # that both have


class Provenance(_Record, frozen=True, kw_only=True):
    """The host that made the trajectory, and its price."""

    host: str
    instance_kind: str  # "reserved" or "spot"
    price_per_hour: float  # dollars; 0 if not configured


class Trajectory(_Record, frozen=True, kw_only=True):
    """One attempt at one task."""

    schema: int
    run_id: str
    task: Task
    group_id: int
    member: int  # 0 .. group_size - 1
    attempt: int  # 0 at first; +1 each time this member is redone
    fork: Fork | None  # None: it began at the start of the task
    actor: str
    turns: Annotated[list[Turn], msgspec.Meta(max_length=MAX_TURNS)]
    tokens: bytes  # int32
    behaviour_logprobs: bytes  # float32, of the distribution in `sampling`; 0 on tokens that were not sampled
    loss_mask: bytes  # one bit per token, little-endian: True on tokens that the policy sampled
    kept: KeptSets | None  # of the sampled tokens; None if each could be any token of the vocabulary
    # Where each token sequence begins; [0] unless earlier messages were rewritten or dropped.
    branch_starts: Annotated[list[int], msgspec.Meta(max_length=MAX_TURNS)]
    # Over the sampled tokens, in order, without gaps.
    version_spans: Annotated[list[VersionSpan], msgspec.Meta(max_length=MAX_SPANS)]
    stop_reason: StopReason
    outcome: Outcome
    score: float  # the task's own measure in [0, 1], without any reward shaping
    success: bool
    # What each part of `env.rewards` measured, without its weight; empty without parts, and in a partial.
    part_values: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_REWARDS)]
    # What a judge of the whole group sees, as `slipstream.envhub.rewards.sibling_judge` reads it; "" without one, and
    # after the judging.
    shown: str
    sampling: Sampling
    started_at_s: float  # unix time by the actor's clock: for people, never for ordering
    duration_s: float
    scoring_s: float  # how long the parts of `env.rewards` took afterwards
    provenance: Provenance

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def own_start(self) -> int:
        """Where its own tokens begin: a fork has those before from its parent."""
        if self.fork is None:
            return 0
        own = self.own_turns
        return own[0].start if own else self.num_tokens

    @property
    def num_own_tokens(self) -> int:
        return self.num_tokens - self.own_start

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that it does not have from a parent."""
        return self.turns[self.fork.num_turns if self.fork else 0 :]

    @property
    def total_reward(self) -> float:
        """The return: the sum of all components over all turns."""
        return math.fsum(reward for turn in self.turns for reward in turn.rewards.values())

    @property
    def oldest_policy_version(self) -> int:
        return min(span.policy_version for span in self.version_spans)

    @property
    def newest_policy_version(self) -> int:
        return max(span.policy_version for span in self.version_spans)

    def token_array(self) -> TokenArray:
        return np.frombuffer(self.tokens, dtype="<i4")

    def behaviour_logprob_array(self) -> LogprobArray:
        return np.frombuffer(self.behaviour_logprobs, dtype="<f4")

    def loss_mask_array(self) -> MaskArray:
        bits = np.frombuffer(self.loss_mask, dtype=np.uint8)
        return np.unpackbits(bits, count=self.num_tokens, bitorder="little").astype(np.bool_)

    def policy_version_array(self) -> VersionArray:
        """The version that sampled each token; 0 for tokens that were not sampled."""
        versions = np.zeros(self.num_tokens, dtype=np.int32)
        for span in self.version_spans:
            versions[span.start : span.stop] = span.policy_version
        return versions


def pack_tokens(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


def pack_logprobs(logprobs: list[float]) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


def pack_mask(mask: list[bool]) -> bytes:
    return np.packbits(np.asarray(mask, dtype=np.bool_), bitorder="little").tobytes()


def decode_trajectory(frame: bytes | memoryview, *, max_bytes: int, vocab_size: int) -> Trajectory:
    """Decode a trajectory and check it. Raises WireError, InvalidTrajectory."""
    trajectory = decode(Trajectory, frame, max_bytes=max_bytes)
    check(trajectory, vocab_size=vocab_size)
    return trajectory


def check(trajectory: Trajectory, *, vocab_size: int) -> None:
    """Raise InvalidTrajectory unless all parts agree with each other.

    Every insert and every claim calls it, so it must be fast: numpy checks the tokens, and the loops are over a few
    plain integers.
    """
    num_tokens = trajectory.num_tokens
    check_tokens(trajectory.tokens, trajectory.branch_starts, vocab_size=vocab_size)
    _check_arrays(trajectory, num_tokens)
    logprobs = trajectory.behaviour_logprob_array()
    _check_numbers(trajectory, logprobs)
    _check_fork(trajectory)
    _check_turns(trajectory.turns)
    stretches = _stretches(trajectory.turns, num_tokens)
    sampled = _marked(stretches, num_tokens)
    if trajectory.loss_mask != np.packbits(sampled, bitorder="little").tobytes():
        num_masked = int(trajectory.loss_mask_array().sum())
        raise InvalidTrajectory(f"loss_mask marks {num_masked} tokens, the turns sampled {int(sampled.sum())}")
    if not all(0 <= span.policy_version <= MAX_POLICY_VERSION for span in trajectory.version_spans):
        raise InvalidTrajectory(f"version_spans have a version that is not in [0, {MAX_POLICY_VERSION}]")
    if _stretches(trajectory.version_spans, num_tokens) != stretches:
        raise InvalidTrajectory("version_spans do not cover exactly the sampled tokens")
    if np.count_nonzero(np.greater(logprobs != 0, sampled)):
        raise InvalidTrajectory("behaviour_logprobs are not 0 on tokens that were not sampled")
    _check_kept(trajectory, sampled, vocab_size)
    if any(sampled[start] for start in trajectory.branch_starts):
        raise InvalidTrajectory(f"branch_starts {trajectory.branch_starts} point to a sampled token, not to a prompt")


def check_tokens(tokens: bytes, branch_starts: list[int], *, vocab_size: int) -> None:
    """Raise InvalidTrajectory unless these are ids of the vocabulary, which `branch_starts` divide into sequences."""
    num_tokens = len(tokens) // 4
    if num_tokens == 0 or len(tokens) != 4 * num_tokens:
        raise InvalidTrajectory(f"tokens have {len(tokens)} bytes, expected a positive multiple of 4")
    ids = np.frombuffer(tokens, dtype="<i4")
    # As unsigned numbers, negative ids are larger than any vocabulary.
    if ids.view("<u4").max() >= vocab_size:
        raise InvalidTrajectory(f"token ids in [{ids.min()}, {ids.max()}], vocabulary is [0, {vocab_size})")
    if branch_starts[:1] != [0] or branch_starts != sorted(set(branch_starts)) or branch_starts[-1] >= num_tokens:
        raise InvalidTrajectory(f"branch_starts {branch_starts[:10]} do not divide {num_tokens} tokens")


def _check_arrays(trajectory: Trajectory, num_tokens: int) -> None:
    if trajectory.schema != SCHEMA:
        raise InvalidTrajectory(f"schema is {trajectory.schema}, expected {SCHEMA}")
    if len(trajectory.behaviour_logprobs) != 4 * num_tokens:
        raise InvalidTrajectory(f"{len(trajectory.behaviour_logprobs) // 4} behaviour_logprobs for {num_tokens} tokens")
    if len(trajectory.loss_mask) != -(-num_tokens // 8):
        raise InvalidTrajectory(f"loss_mask of {len(trajectory.loss_mask)} bytes for {num_tokens} tokens")


def _check_numbers(trajectory: Trajectory, logprobs: LogprobArray) -> None:
    if not (logprobs.min() > -math.inf and logprobs.max() <= 1e-3):  # also false for NaN
        raise InvalidTrajectory("behaviour_logprobs contain a value that is not finite, or above 0")
    if not 0.0 <= trajectory.score <= 1.0:
        raise InvalidTrajectory(f"score {trajectory.score} is outside [0, 1]")
    if trajectory.outcome is not OUTCOME_OF[trajectory.stop_reason]:
        raise InvalidTrajectory(f"{trajectory.stop_reason} cannot have outcome {trajectory.outcome}")
    for value in trajectory.part_values.values():
        if not -MAX_REWARD <= value <= MAX_REWARD:  # also true for NaN
            raise InvalidTrajectory(
                f"part_values {trajectory.part_values} contain a value that is not finite, or beyond {MAX_REWARD:g}"
            )
    num_turns, num_spans = len(trajectory.turns), len(trajectory.version_spans)
    if num_turns > MAX_TURNS or num_spans > MAX_SPANS:
        raise InvalidTrajectory(
            f"{num_turns} turns and {num_spans} version spans, the limits are {MAX_TURNS} and {MAX_SPANS}"
        )


def _check_fork(trajectory: Trajectory) -> None:
    """Parents have lower numbers than their forks. Only a partial may have no turn of its own yet."""
    fork, num_turns = trajectory.fork, len(trajectory.turns)
    if fork is None:
        return
    most = num_turns if trajectory.outcome is Outcome.PREEMPTED else num_turns - 1
    if not (0 <= fork.parent < trajectory.member and 1 <= fork.num_turns <= most):
        raise InvalidTrajectory(
            f"fork {fork} does not fit member {trajectory.member} with {num_turns} turns: its parent must have a lower "
            "number, and it must have a turn of its own"
        )


def _check_turns(turns: list[Turn]) -> None:
    if not turns:
        raise InvalidTrajectory("no turns: nothing was sampled")
    for turn in turns:
        start, stop, rewards = turn.start, turn.stop, turn.rewards
        if not rewards:
            raise InvalidTrajectory(f"turn [{start}, {stop}) has no reward; a reward of 0 must be given too")
        if len(rewards) > MAX_REWARDS:
            raise InvalidTrajectory(f"turn [{start}, {stop}) has {len(rewards)} rewards, more than {MAX_REWARDS}")
        for reward in rewards.values():
            if not -MAX_REWARD <= reward <= MAX_REWARD:  # also true for NaN
                raise InvalidTrajectory(
                    f"rewards {rewards} contain a value that is not finite, or beyond {MAX_REWARD:g}"
                )
        if len(turn.state_key) > MAX_STATE_KEY:
            raise InvalidTrajectory(
                f"turn [{start}, {stop}) has a state_key of {len(turn.state_key)} characters, more than {MAX_STATE_KEY}"
            )


def _stretches(parts: Sequence[Turn | VersionSpan], num_tokens: int) -> list[int]:
    """Where the tokens of turns or spans begin and end, as [start, stop, start, stop]; adjacent ones are joined."""
    stretches: list[int] = []
    stop = 0
    for part in parts:
        before, start, stop = stop, part.start, part.stop
        if not before <= start < stop <= num_tokens:
            kind = "turn" if isinstance(part, Turn) else "version span"
            raise InvalidTrajectory(f"{kind} [{start}, {stop}) overlaps another {kind} or exceeds the tokens")
        if stretches and start == before:
            stretches[-1] = stop
        else:
            stretches += (start, stop)
    return stretches


def _check_kept(trajectory: Trajectory, sampled: MaskArray, vocab_size: int) -> None:
    kept, sampling = trajectory.kept, trajectory.sampling
    if kept is None and sampling.is_cut:
        raise InvalidTrajectory(f"no kept sets, but the sampling was {sampling}")
    if kept is not None:
        tokens, least = trajectory.token_array()[sampled], int(sampling.is_cut)
        contradiction = kept.contradiction(tokens, vocab_size=vocab_size, least=least)
        if contradiction:
            raise InvalidTrajectory(contradiction)


def _marked(stretches: list[int], num_tokens: int) -> MaskArray:
    """A mask that is True inside the ranges. Joining runs of bytes is faster than assigning slices of an array."""
    runs: list[bytes] = []
    marked = 0
    for start, stop in zip(stretches[::2], stretches[1::2], strict=True):
        runs += (b"\0" * (start - marked), b"\1" * (stop - start))
        marked = stop
    return np.frombuffer(b"".join(runs) + b"\0" * (num_tokens - marked), dtype=np.bool_)
