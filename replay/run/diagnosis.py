"""The state of a run in one sentence: what is wrong, or which side waits, with the evidence and the next step.

The order is that of causes: where no actor is alive, whatever else looks wrong follows from it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from slipstream.common.config.config import Config
from slipstream.replay.fleet.fleet import Census, RunState
from slipstream.replay.records.failures import DIED_TWICE, Failure
from slipstream.replay.records.ledger import Ledger
from slipstream.replay.run.equal_returns import Outlook, outlook

FEWEST_ATTEMPTS = 8  # fewer failures may be chance
FEWEST_EPISODES = 64  # that all earn 0, before this counts as a fault
FEWEST_GROUPS = 16  # that all have equal returns, before this counts as a fault
NUM_STEPS = 5  # in a row without a gradient, or without valid actions
FEWEST_VALID = 0.1  # a smaller share of valid actions counts as a fault
MOSTLY_EQUAL = 0.9  # the share of groups without a difference that leaves little to learn
SLACK = 2  # versions; an actor may be fetching one while the next is offered
QUIET_S, QUIET_STEPS = 60.0, 10  # a learner that makes no step for so long, and for so many times its last step
BUSY, IDLE = 0.9, 0.5  # the share of a step in which the learner works
MAX_REFUSAL_CHARS = 600  # its end names the suspects
MAX_SHOWN_CHARS = 300  # of the reason of a failure
_ERROR = re.compile(r"\b[A-Za-z_.]*(Error|Exception): \S|^slipstream \S+: ")
FAULT_S = 30.0  # how long a fault lasts before it is logged; an actor that joins needs some time


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a diagnosis is made from."""

    config: Config  # of the run
    state: RunState | None  # None if no learner has described the run
    census: Census = field(default_factory=lambda: Census([], []))
    ledger: Ledger
    earlier: Ledger | None = None  # of some time before; None to judge by the whole run
    failures: Sequence[Failure] = ()  # newest first
    steps: Sequence[Mapping[str, float]]  # records of the newest optimizer steps, the last one last
    newest_version: int = -1  # that is on offer; -1 if none is
    now_s: float  # Unix time
    last_words: str = ""  # the last line of the learner's log, where that is on this machine
    actor_words: str = ""  # the last line of an actor's log, or its last error; only while no actor is alive
    has_seen_actors: bool = False  # whether an actor was alive at a look of this observer

    def since(self, count: Callable[[Ledger], float]) -> float:
        """By how much `count` has grown since `earlier`."""
        return count(self.ledger) - (count(self.earlier) if self.earlier else 0)

    @property
    def num_episodes(self) -> int:
        """How many episodes have ended since `earlier`."""
        return round(self.since(lambda ledger: sum(ledger.episodes.values())))

    @property
    def success(self) -> float:
        """The share of them that solved their task; 0 if none has ended."""
        return self.since(lambda ledger: sum(ledger.successes.values())) / max(self.num_episodes, 1)

    @property
    def mean_return(self) -> float:
        """Their mean return; 0 if none has ended."""
        return self.since(lambda ledger: sum(ledger.returns.values())) / max(self.num_episodes, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    cause: str
    evidence: str
    next_step: str
    is_fault: bool = True

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}; {self.next_step}"


class FaultLog:
    """Says when a fault begins and when it is over; a short one is left out."""

    def __init__(self) -> None:
        self._fault = ""  # the cause of the present one
        self._since_s = 0.0
        self._is_logged = False

    def line(self, found: Diagnosis, *, now_s: float) -> str:
        """A fault once it has lasted for FAULT_S, and its end; empty if neither is new. `now_s` is of any clock."""
        cause = found.cause if found.is_fault else ""
        if cause != self._fault:
            ended = f"no longer: {self._fault}" if self._is_logged else ""
            self._fault, self._since_s, self._is_logged = cause, now_s, False
            return ended
        if not cause or self._is_logged or now_s - self._since_s < FAULT_S:
            return ""
        self._is_logged = True
        return f"FAULT: {found}"


def diagnose(facts: Facts) -> Diagnosis:
    """The first cause that explains the facts."""
    return next((found for find in FINDERS if (found := find(facts))), None) or _who_waits(facts)


def diagnose_records(facts: Facts) -> Diagnosis:
    """The first cause that shows in the ledger and the steps of a run, whether or not its processes are still alive.

    `facts` must have a step.
    """
    return _first_fault(facts, (_invalid_actions, _no_reward, _no_gradient, _equal_siblings)) or _who_waits(facts)


def _first_fault(facts: Facts, finders: "Iterable[Finder]") -> Diagnosis | None:
    return next((found for find in finders if (found := find(facts)) and found.is_fault), None)


def _solved(evidence: str) -> Diagnosis:
    return Diagnosis(
        cause="the tasks are solved",
        evidence=f"{evidence}, so there is nothing left to learn",
        next_step="stop here, or use harder tasks",
        is_fault=False,
    )


def _not_training(facts: Facts) -> Diagnosis | None:
    resume = f"`slipstream up --resume {facts.config.run.name}`"
    match facts.state:
        case None:
            return Diagnosis(
                cause="the run has not started",
                evidence=(facts.last_words[-MAX_SHOWN_CHARS:] or "no learner has described it")
                + (_quoted(facts) if is_error(facts.actor_words) else ""),
                next_step="wait; `slipstream up` starts one, and `slipstream learner` does elsewhere",
                is_fault=False,
            )
        case RunState.STARTING:
            if facts.has_seen_actors and (fault := _first_fault(facts, _OF_ACTORS)):  # an evaluation waits for them
                return fault
            return Diagnosis(
                cause="the learner starts",
                evidence=(facts.last_words[-MAX_SHOWN_CHARS:] or "it loads the model and runs the warm start")
                + _quoted(facts),
                next_step="wait; its log says how far it is",
                is_fault=False,
            )
        case RunState.FINISHED:
            return Diagnosis(
                cause="the run has finished",
                evidence=f"{facts.ledger.trained} groups were trained",
                next_step=f"evaluate with `slipstream eval run.name={facts.config.run.name}`, continue with {resume} "
                "learner.steps=MORE",
                is_fault=False,
            )
        case RunState.FAILED:
            return Diagnosis(
                cause="the learner ended with an error",
                evidence=facts.last_words[-MAX_REFUSAL_CHARS:] or "it set the run's state to failed",
                next_step=f"mend that, or read its log, then continue with {resume}",
            )
    return None


def _refused_weights(facts: Facts) -> Diagnosis | None:
    """The newest version does not fit, or failed its probe. Actors that have left count unless another serves it."""
    newest, census = facts.newest_version, facts.census
    asked = census.alive if any(actor.policy_version >= newest for actor in census.alive) else census.everyone
    refused = [(member.name, member.refusal) for member in asked if member.refusal and member.refusal.unfit]
    refusals = {name: refusal for name, refusal in refused if refusal.policy_version >= newest}
    if not refusals:
        return None
    name, refusal = next(iter(refusals.items()))
    return Diagnosis(
        cause="actors refuse the weights",
        evidence=f"{len(refusals)} actors refuse version {newest}; {name}: {refusal.reason[:MAX_REFUSAL_CHARS]}",
        next_step="their old weights keep serving; docs/weights.md says what the probe of a version shows",
    )


def _engines_die(facts: Facts) -> Diagnosis | None:
    given_up = facts.since(lambda ledger: ledger.failed.get("infra_failure", 0))
    if not given_up or not facts.failures or not facts.failures[0].reason.startswith(DIED_TWICE):
        return None
    death = facts.failures[0].reason.removeprefix(f"{DIED_TWICE}: ")
    return Diagnosis(
        cause="engines die",
        evidence=f"{given_up:.0f} attempts were given up; the last death: {death[:MAX_REFUSAL_CHARS]}",
        next_step="read the log of an actor; `slipstream replay failures` names the groups",
    )


def _no_actor(facts: Facts) -> Diagnosis | None:
    if facts.census.alive:
        return None
    if not facts.census.everyone:
        return Diagnosis(
            cause="no actor has joined yet",
            evidence=f"{facts.ledger.queued} groups wait for one{_quoted(facts)}",
            next_step="start `slipstream actors`, or wait for their engines; their logs say how far they are",
            is_fault=False,
        )
    return Diagnosis(
        cause="no actor is alive",
        evidence=f"none sends heartbeats; {facts.ledger.queued} groups wait for one{_quoted(facts)}",
        next_step="start `slipstream actors`, or read the log of those that ended",
    )


def is_error(line: str) -> bool:
    """Whether a line of a log is an error."""
    return _ERROR.search(line) is not None


def _quoted(facts: Facts) -> str:
    """What an actor on this machine has logged last."""
    return f"; the log of an actor: {facts.actor_words[-MAX_SHOWN_CHARS:]}" if facts.actor_words else ""


def _attempts_fail(facts: Facts) -> Diagnosis | None:
    failed = facts.since(lambda ledger: sum(ledger.failed.values()))
    finished = facts.since(lambda ledger: ledger.inserted)
    if failed < max(FEWEST_ATTEMPTS, finished) or not facts.failures:
        return None
    last = facts.failures[0]
    return Diagnosis(
        cause="attempts fail" if finished else "every attempt fails",
        evidence=f"{failed:.0f} failed and {finished:.0f} finished; the last one: {last.outcome}: "
        f"{last.reason[:MAX_SHOWN_CHARS]}",
        next_step="mend the cause; `slipstream replay failures` lists the last hundred",
    )


def _stale_actors(facts: Facts) -> Diagnosis | None:
    newest, actors, most = facts.newest_version, facts.census.alive, facts.config.replay.max_lag + SLACK
    behind = [actor for actor in actors if newest - actor.policy_version > most]
    if not behind:
        return None
    oldest = min(behind, key=lambda actor: actor.policy_version)
    why = f": {oldest.refusal.reason[:MAX_SHOWN_CHARS]}" if oldest.refusal else ""
    return Diagnosis(
        cause="actors have old weights",
        evidence=f"{len(behind)} of {len(actors)} are more than {most} versions behind; "
        f"{oldest.name} has {oldest.policy_version}, the newest is {newest}{why}",
        next_step="read the actor's log; it plays an evaluation, or its host cannot reach the learner's `weights.host`",
    )


def _invalid_actions(facts: Facts) -> Diagnosis | None:
    shares = [step["trained/valid_actions"] for step in facts.steps[-NUM_STEPS:] if "trained/valid_actions" in step]
    if len(shares) < NUM_STEPS or max(shares) >= FEWEST_VALID or _outlook_of(facts.steps) is Outlook.SOLVED:
        return None
    return Diagnosis(
        cause="the policy does not follow the action format",
        evidence=f"{fmean(shares):.0%} of the actions of the last {NUM_STEPS} steps were valid",
        next_step="look at some with `slipstream replay show GROUP`; try another `env.action_format`, a longer "
        "`sampling.max_turn_tokens`, or a warm start",
    )


def _no_reward(facts: Facts) -> Diagnosis | None:
    # A sum of 0 may also be one of opposites, or of costs that a good policy does not have: then some succeed. Judges
    # of groups and a reward model reward an episode after it was stored.
    if facts.num_episodes < FEWEST_EPISODES or facts.mean_return or facts.success:
        return None
    if (
        facts.config.objective.compares == "teacher"  # the policy learns from no rewards
        or facts.ledger.judging
        or any(step.get("trained/reward") for step in facts.steps)
    ):
        return None
    return Diagnosis(
        cause="no episode earns a reward",
        evidence=f"the returns of the last {facts.num_episodes} episodes are 0",
        next_step="look at some with `slipstream replay show GROUP`; use a warm start, easier tasks or partial rewards",
    )


def _no_gradient(facts: Facts) -> Diagnosis | None:
    newest = facts.steps[-NUM_STEPS:]
    if len(newest) < NUM_STEPS:
        return None
    if not any(step.get("optim/grad_norm", 1.0) or _is_of_critic(step) for step in newest):
        success, mean_return = _mean(newest, "trained/success"), _mean(newest, "trained/reward")
        evidence = (
            f"the norm of the gradient was 0 in the last {NUM_STEPS} steps, with {success:.0%} successes and a mean "
            f"return of {mean_return:.3g}"
        )
        if (why := _outlook_of(newest)) is Outlook.SOLVED:
            return _solved(evidence)
        return Diagnosis(
            cause="nothing is learned",
            evidence=evidence,
            next_step=why.value
            if why is Outlook.HOPELESS
            else "look at `optim/masked_fraction` and at the advantages; does `objective` fit the rewards?",
        )
    if all(was_refused(step) for step in newest):
        return Diagnosis(
            cause="every step is skipped",
            evidence=f"the gradient was not finite, or the guard refused it, in the last {NUM_STEPS} steps",
            next_step="lower `optim.lr` or `replay.max_lag`; `mismatch/` shows how far data and policy are apart",
        )
    return None


def was_refused(step: Mapping[str, float]) -> bool:
    """Whether the gradient of a step was not finite, or the guard refused it."""
    return bool(step.get("optim/skipped", 0.0)) and not _is_of_critic(step)


def _is_of_critic(step: Mapping[str, float]) -> bool:
    """Whether only the critic learns in a step: it skips the policy, though nothing speaks against its gradient."""
    is_sound = math.isfinite(step.get("optim/grad_norm", math.nan)) and step.get("optim/guard_scale", 0.0) > 0
    return bool(step.get("optim/skipped", 0.0)) and is_sound


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(step.get(name, 0.0) for step in steps)


def _outlook_of(steps: Sequence[Mapping[str, float]]) -> Outlook:
    """The outlook of what the newest steps trained."""
    newest = steps[-NUM_STEPS:]
    return outlook(success=_mean(newest, "trained/success"), mean_return=_mean(newest, "trained/reward"))


def _equal_siblings(facts: Facts) -> Diagnosis | None:
    equal = facts.since(lambda ledger: ledger.dropped.get("zero_variance", 0))
    others = facts.since(lambda ledger: ledger.trained + ledger.claimed)
    if equal < FEWEST_GROUPS or equal < MOSTLY_EQUAL * (equal + others):
        return None
    evidence = (
        f"{equal:.0f} of {equal + others:.0f} groups had nothing to compare, with {facts.success:.0%} successes and a "
        f"mean return of {facts.mean_return:.3g}"
    )
    why = outlook(success=facts.success, mean_return=facts.mean_return)
    if why is Outlook.SOLVED:
        return _solved(evidence)
    return Diagnosis(cause="siblings earn the same", evidence=evidence, next_step=why.value.partition(": ")[2])


def _no_step(facts: Facts) -> Diagnosis | None:
    if not facts.steps:
        return None
    newest = facts.steps[-1]
    if facts.config.learner.steps <= newest.get("step", 0):
        return Diagnosis(
            cause="the last step is made",
            evidence="the learner exports the model, or evaluates it",
            next_step="wait",
            is_fault=False,
        )
    quiet_s = facts.now_s - newest.get("time", facts.now_s)
    if quiet_s < max(QUIET_S, QUIET_STEPS * newest.get("perf/step_s", 0.0)):
        return None
    return Diagnosis(
        cause="the learner makes no steps",
        evidence=f"the last was {quiet_s:.0f} s ago; {facts.ledger.unclaimed}",
        next_step="is its process alive? Its log says what it waits for",
    )


def _who_waits(facts: Facts) -> Diagnosis:
    if not facts.steps:
        return Diagnosis(
            cause="the first step is being collected", evidence=facts.ledger.unclaimed, next_step="wait", is_fault=False
        )
    newest = facts.steps[-1]
    busy = fmean(step["perf/learner_busy"] for step in facts.steps)
    advised = newest.get("fleet/advised_actors", 0.0)
    cause, next_step = "neither side waits much", "leave it"
    if busy > BUSY:
        cause = "actors wait for the learner"
        next_step = f"use more `learner.ranks`, or fewer actors (advised: {advised:.0f})"
    elif busy < IDLE:
        cause = "the learner waits for actors"
        next_step = f"add actors (advised: {advised:.0f}), or raise `actors.max_episodes`"
    num_actors = newest.get("fleet/num_actors", len(facts.census.alive))
    last = f"the last {len(facts.steps)} steps" if len(facts.steps) > 1 else "the last step"
    evidence = f"the learner was busy for {busy:.0%} of {last}, with {num_actors:.0f} actors"
    return Diagnosis(cause=cause, evidence=evidence, next_step=next_step, is_fault=False)


Finder = Callable[[Facts], Diagnosis | None]
_OF_ACTORS: Iterable[Finder] = (_refused_weights, _engines_die, _no_actor, _attempts_fail)
FINDERS: Iterable[Finder] = (
    _not_training,
    *_OF_ACTORS,
    _stale_actors,
    _invalid_actions,
    _no_reward,
    _no_gradient,
    _equal_siblings,
    _no_step,
)
