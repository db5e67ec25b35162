"""Collects the tokens of a running episode, and makes its trajectory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import msgspec

from slipstream.actors.engine.engine import Completion, moved
from slipstream.common.process.wire import SCHEMA
from slipstream.common.records.kept_sets import KeptSets, joined, no_sets
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import (
    OUTCOME_OF,
    Fork,
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
from slipstream.common.text.chat import Extension
from slipstream.envhub.driving import Ending, Reply
from slipstream.envhub.env import EnvError, Observation

UNSCORED = {"reward": 0.0}  # of a generation whose episode is scored at its end


class ReplayMismatch(RuntimeError):
    """The environment behaves differently from the record, so the recorded tokens cannot be continued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The identity of a trajectory that is being made."""

    run_id: str
    task: Task
    group_id: int
    member: int = 0
    attempt: int = 0
    actor: str
    sampling: Sampling
    seed: int
    provenance: Provenance

    def turn_seed(self, turn: int) -> int:
        """The seed of one generation, so that a trajectory depends only on the weights and on the run's seed."""
        return reduce(_mixed, (self.group_id, self.member, self.attempt, turn), self.seed)


def _mixed(seed: int, number: int) -> int:
    """Another seed for each `number`."""
    return (seed * 1_000_003 + number + 1) % (1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One reply of the policy, and what the environment made of it, as text."""

    reply: str  # all that the policy wrote
    action: str  # what the environment received
    answer: tuple[Message, ...]


@dataclass(kw_only=True, slots=True)
class EpisodeRecord:
    """The tokens of a running episode. Element i of each per-token list belongs to `tokens[i]`."""

    attempt: Attempt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)  # of the sampled tokens, one part for each generation
    branch_starts: list[int] = field(default_factory=lambda: [0])
    version_spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    fork: Fork | None = None  # the turns that it has from a sibling
    prompt_stop: int = 0  # where the last prompt ends; later tokens belong to an unfinished turn
    opening: tuple[Message, ...] = ()  # the first messages; empty if the environment renders prompts itself
    exchanges: list[Exchange] = field(default_factory=list)  # of the turns, once they are played here; also empty
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the task, for the parts of the reward
    score: float = 0.0  # after the last turn
    success: bool = False  # after the last turn
    started_at_s: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)
    earlier_s: float = 0.0  # duration of the episode on preempted actors

    @property
    def is_replaying(self) -> bool:
        """Whether the next turn is recorded already: a preempted actor played it, or a sibling."""
        return len(self.exchanges) < len(self.turns)

    def prompt(self) -> list[int]:
        """The prompt of the next turn."""
        return self.prompt_before(self.turns[len(self.exchanges)].start if self.is_replaying else len(self.tokens))

    def prompt_before(self, place: int) -> list[int]:
        """The branch that has token `place`, up to there."""
        return self.tokens[max(start for start in self.branch_starts if start < place) : place]

    def reply(self, turn: Turn) -> Reply:
        """What the policy wrote in a recorded turn."""
        own = slice(turn.start, turn.stop)
        return Reply(tokens=self.tokens[own], logprobs=self.logprobs[own], finish_reason=turn.finish_reason)

    def replayed(self, state_key: str) -> Reply | None:
        """The reply of the next turn if it is recorded. Raises ReplayMismatch if the state was another one then."""
        if not self.is_replaying:
            return None
        number = len(self.exchanges)
        if state_key != self.turns[number].state_key:
            raise ReplayMismatch(f"the state before turn {number} differs from the recorded one")
        return self.reply(self.turns[number])

    def add_prompt(self, extension: Extension) -> None:
        """Add the prompt of the next turn. Raises ReplayMismatch if another one is recorded."""
        number = len(self.exchanges)
        start = self.turns[number - 1].stop if number else 0
        stop = self.turns[number].start if self.is_replaying else self.prompt_stop
        if start < stop:  # it is recorded
            if extension.tokens != self.tokens[start:stop]:
                differ = f"the answer to turn {number - 1} differs from the recorded one"
                raise ReplayMismatch(differ if number else "the first messages differ from those recorded")
            if extension.new_branch != (start in self.branch_starts[1:]):
                raise ReplayMismatch(
                    f"the prompt after turn {number - 1} begins a branch, or does not, unlike the recorded one"
                )
            return
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
        self.kept.append(completion.kept or no_sets(len(completion.tokens)))
        self.version_spans += [moved(span, by=start) for span in completion.version_spans]

    def add_turn(
        self,
        reply: Completion | Reply,
        observation: Observation,
        exchange: Exchange,
        *,
        state_key: str,
        valid_action: bool,
        generate_s: float,
        env_s: float,
    ) -> None:
        """Record the turn of the last completion; `state_key` is of the state in which its action was chosen.

        Numbers are converted, because an environment may return numpy's, which cannot be encoded. Raises EnvError
        without a reward, and ReplayMismatch if the turn is recorded already and was another one.
        """
        number = len(self.exchanges)
        rewards = {name: float(reward) for name, reward in observation.rewards.items()}
        valid_action = valid_action and bool(observation.valid_action)
        if self.is_replaying:
            self._check_turn(number, rewards, valid_action=valid_action, done=observation.done)
        elif not rewards:
            raise EnvError("step returned no rewards; return a reward of 0 if nothing was earned")
        else:
            self.turns.append(
                Turn(
                    start=len(self.tokens) - len(reply.tokens),
                    stop=len(self.tokens),
                    state_key=state_key,
                    rewards=rewards,
                    finish_reason=reply.finish_reason,
                    valid_action=valid_action,
                    generate_s=generate_s,
                    env_s=env_s,
                )
            )
        self.exchanges.append(exchange)
        self.score, self.success = float(observation.score), bool(observation.success)

    def _check_turn(self, number: int, rewards: dict[str, float], *, valid_action: bool, done: bool) -> None:
        recorded = self.turns[number]
        if done:
            raise ReplayMismatch(f"the episode ends with turn {number}, and the recorded one continued")
        if not recorded.rewards:  # of a fork
            self.turns[number] = msgspec.structs.replace(recorded, rewards=rewards)
        elif recorded.rewards != rewards:
            raise ReplayMismatch(f"the rewards of turn {number} are {rewards}, recorded {recorded.rewards}")
        if recorded.valid_action != valid_action:
            was = "valid" if recorded.valid_action else "invalid"
            raise ReplayMismatch(f"the action of turn {number} was recorded as {was}")

    def add_summary(self, reply: Completion | Reply, summary: str, *, generate_s: float) -> None:
        """Record the turn of a summary: it earns nothing, and the environment does not see it."""
        nothing = Observation(
            messages=(),
            rewards=dict.fromkeys(self.turns[len(self.exchanges) - 1].rewards, 0.0),
            score=self.score,
            success=self.success,
        )
        exchange = Exchange(reply=summary, action=summary, answer=())
        self.add_turn(reply, nothing, exchange, state_key="", valid_action=True, generate_s=generate_s, env_s=0.0)

    def reopen_last_turn(self) -> None:
        """Forget the last turn, so that `partial` is of the turns before it: the episode is not over any more."""
        self.prompt_stop = self.turns[-1].start
        self.turns = self.turns[:-1]  # a new list: the record of the episode has the other

    def add_call(
        self, prompt: list[int], completion: Completion, *, valid_action: bool = True, generate_s: float, env_s: float
    ) -> None:
        """Record one of several generations that may overlap, as a turn without a reward yet.

        It extends the longest sequence that `prompt` continues, which need not be the last one; else it begins a
        branch at the end. The tokens after it move.
        """
        length, at = self._continued_by(prompt)
        start = at + len(prompt) - length
        stop = start + len(completion.tokens)
        num_before = sum(self.loss_mask[:at])
        self._move(at, by=stop - at)
        if at and not length:
            self.branch_starts.append(at)
        self.tokens[at:at] = prompt[length:] + completion.tokens
        self.logprobs[at:at] = [0.0] * (start - at) + completion.logprobs
        sets, kept = joined(self.kept), completion.kept or no_sets(len(completion.tokens))
        self.kept = [sets.between(0, num_before), kept, sets.between(num_before, sum(self.loss_mask))]
        self.loss_mask[at:at] = [False] * (start - at) + [True] * (stop - start)
        self.version_spans += [moved(span, by=start) for span in completion.version_spans]
        self.version_spans.sort(key=lambda span: span.start)
        turn = Turn(
            start=start,
            stop=stop,
            state_key="",
            rewards=UNSCORED,
            finish_reason=completion.finish_reason,
            valid_action=valid_action,
            generate_s=generate_s,
            env_s=env_s,
        )
        self.turns = sorted([*self.turns, turn], key=lambda turn: turn.start)
        self.prompt_stop = len(self.tokens)

    def _continued_by(self, prompt: list[int]) -> tuple[int, int]:
        """The length and the end of the longest sequence that `prompt` begins with; 0 and the end of all without."""
        stops = [*self.branch_starts[1:], len(self.tokens)]
        fitting = [
            (stop - start, stop)
            for start, stop in zip(self.branch_starts, stops, strict=True)
            if prompt[: stop - start] == self.tokens[start:stop]
        ]
        return max(fitting, default=(0, len(self.tokens)))

    def _move(self, at: int, *, by: int) -> None:
        """Move what begins at token `at` or later."""
        self.branch_starts = [start + by if start >= at > 0 else start for start in self.branch_starts]
        self.version_spans = [moved(span, by=by) if span.start >= at else span for span in self.version_spans]
        self.turns = [moved(turn, by=by) if turn.start >= at else turn for turn in self.turns]

    def end(self, ending: Ending, *, env_s: float) -> None:
        """Give the last turn the rewards of the episode, and the others 0. `env_s` is the time since then."""
        nothing = dict.fromkeys(list(ending.rewards)[:1], 0.0)
        self.turns = [msgspec.structs.replace(turn, rewards=nothing) for turn in self.turns]
        rewards = {name: float(reward) for name, reward in ending.rewards.items()}
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], rewards=rewards, env_s=self.turns[-1].env_s + env_s)
        self.score, self.success = float(ending.score), bool(ending.success)

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
        kept = joined(self.kept).between(0, sum(self.loss_mask[:stop]))
        return Trajectory(
            schema=SCHEMA,
            run_id=attempt.run_id,
            task=attempt.task,
            group_id=attempt.group_id,
            member=attempt.member,
            attempt=attempt.attempt,
            fork=self.fork,
            actor=attempt.actor,
            turns=self.turns,
            tokens=pack_tokens(self.tokens[:stop]),
            behaviour_logprobs=pack_logprobs(self.logprobs[:stop]),
            loss_mask=pack_mask(self.loss_mask[:stop]),
            kept=kept if kept.ids else None,
            branch_starts=[start for start in self.branch_starts if start < stop],
            version_spans=[span for span in self.version_spans if span.stop <= stop],
            stop_reason=stop_reason,
            outcome=OUTCOME_OF[stop_reason],
            score=self.score,
            success=self.success,
            part_values={},
            shown="",
            sampling=attempt.sampling,
            started_at_s=self.started_at_s,
            duration_s=self.earlier_s + time.perf_counter() - self.started,
            scoring_s=0.0,
            provenance=attempt.provenance,
        )
