"""Collects the tokens of a running episode, and makes its record."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.engine import Completion
from common.chat import Extension
from common.kept_sets import KeptSets, joined
from common.message import Message
from common.trajectory import (
    OUTCOME_OF,
    Provenance,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    pack_logprobs,
    pack_mask,
    pack_tokens,
)
from common.wire import SCHEMA
from envhub.env import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The identity of a trajectory that is being made."""

    run_id: str
    task: Task
    group_id: int
    member: int
    attempt: int
    actor: str
    sampling: Sampling
    seed: int
    provenance: Provenance

    def turn_seed(self, turn: int) -> int:
        """The seed of one generation, so that a trajectory depends only on the weights and on the run's seed."""
        mixed = self.seed
        for part in (self.group_id, self.member, self.attempt, turn):
            mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
        return mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One reply of the policy, and what the environment made of it, as text."""

    reply: str  # all that the policy wrote
    action: str  # what the environment received
    answer: tuple[Message, ...]


@dataclass(kw_only=True, slots=True)
class Tape:
    """The tokens of a running episode. Element i of each per-token list belongs to `tokens[i]`."""

    attempt: Attempt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)  # of the sampled tokens, one part for each generation
    branch_starts: list[int] = field(default_factory=lambda: [0])
    version_spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_stop: int = 0  # where the last prompt ends; later tokens belong to an unfinished turn
    opening: tuple[Message, ...] = ()  # the first messages; empty if the environment renders prompts itself
    exchanges: list[Exchange] = field(default_factory=list)  # of the turns; empty in the same case
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the task, for the parts of the reward
    score: float = 0.0  # after the last turn
    success: bool = False  # after the last turn
    started_at_s: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    earlier_s: float = 0.0  # duration of the episode on preempted actors

    def prompt(self) -> list[int]:
        """The current branch, which the next generation continues."""
        return self.tokens[self.branch_starts[-1] :]

    def add_prompt(self, extension: Extension) -> None:
        if extension.new_branch:
            self.branch_starts.append(len(self.tokens))
        self.tokens += extension.tokens
        self.logprobs += [0.0] * len(extension.tokens)
        self.loss_mask += [False] * len(extension.tokens)
        self.prompt_stop = len(self.tokens)

    def add_completion(self, completion: Completion) -> None:
        start = len(self.tokens)
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.loss_mask += [True] * len(completion.tokens)
        if completion.kept is not None:
            self.kept.append(completion.kept)
        self.version_spans += [
            VersionSpan(start=start + span.start, stop=start + span.stop, policy_version=span.policy_version)
            for span in completion.version_spans
        ]

    def add_turn(
        self,
        completion: Completion,
        observation: Observation,
        *,
        state_key: str,
        valid_action: bool,
        generate_s: float,
        env_s: float,
    ) -> None:
        """Record the turn of the last completion; `state_key` is of the state in which its action was chosen.

        Numbers are converted, because an environment may return numpy's, which cannot be encoded.
        """
        self.turns.append(
            Turn(
                start=len(self.tokens) - len(completion.tokens),
                stop=len(self.tokens),
                state_key=state_key,
                rewards={name: float(reward) for name, reward in observation.rewards.items()},
                finish_reason=completion.finish_reason,
                valid_action=valid_action and bool(observation.valid_action),
                generate_s=generate_s,
                env_s=env_s,
            )
        )
        self.score, self.success = float(observation.score), bool(observation.success)

    def reopen_last_turn(self) -> None:
        """Forget the last turn, so that `partial` is of the turns before it: the episode is not over any more."""
        self.prompt_stop = self.turns[-1].start
        self.turns = self.turns[:-1]  # a new list: the record of the episode has the other

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """The record of a finished episode, without the prompt after the last turn, from which nothing was sampled."""
        return self._record(stop=self.turns[-1].stop, stop_reason=stop_reason)

    def partial(self) -> Trajectory:
        """The record of the whole turns, at least one, and of the prompt after them.

        Tokens sampled after that prompt are lost: their turn has no answer yet.
        """
        return self._record(stop=self.prompt_stop, stop_reason=StopReason.PREEMPTED)

    def _record(self, *, stop: int, stop_reason: StopReason) -> Trajectory:
        attempt = self.attempt
        return Trajectory(
            schema=SCHEMA,
            run_id=attempt.run_id,
            task=attempt.task,
            group_id=attempt.group_id,
            member=attempt.member,
            attempt=attempt.attempt,
            actor=attempt.actor,
            turns=self.turns,
            tokens=pack_tokens(self.tokens[:stop]),
            behaviour_logprobs=pack_logprobs(self.logprobs[:stop]),
            loss_mask=pack_mask(self.loss_mask[:stop]),
            kept=joined(self.kept).between(0, sum(self.loss_mask[:stop])) if self.kept else None,
            branch_starts=[start for start in self.branch_starts if start < stop],
            version_spans=[span for span in self.version_spans if span.stop <= stop],
            stop_reason=stop_reason,
            outcome=OUTCOME_OF[stop_reason],
            score=self.score,
            success=self.success,
            part_values={},
            sampling=attempt.sampling,
            started_at_s=self.started_at_s,
            duration_s=self.earlier_s + time.perf_counter() - self.started,
            scoring_s=0.0,
            provenance=attempt.provenance,
        )
