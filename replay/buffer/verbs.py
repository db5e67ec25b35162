"""The trajectory buffer: a state machine in Redis, in which every group is in exactly one state.

                                             claim, uses left
                                                   +--+
                                                   v  |
    open --> queued --lease--> leased --complete--> ready --claim(step)--> claimed --settle(step)--> trained
               ^                | |                 ^ |                    ^  |
               +--- release ----+ |                 +----- reopen(step) -------+
               +--- expired ------+                   |                    |
               |                  |                   +- too old, and used-+
               |           out of attempts            |
               |                  |                too old
               |                  v                   v
               |               dropped  <-----  drop, from any state
               |                  ^
               |                  +--- more than MAX_QUARANTINED
               |                                 |
               +---- requeue -------------- quarantined  <--  poison, or a person's request, from any state
                   (leased, judging, ready too)

A group that a judge marks as a whole is `judging` between leased and ready. A judge leases it there, and its verdict
makes the group ready. It waits again after the lease has expired or the judging has failed, and is dropped as
`judge_failed` when it has no attempts left.

A group that a model has learned from is never counted as dropped. It is retired instead: it becomes claimed for the
step of its last use, and is settled with that step. A leased group may hold partials: the turns that a preempted actor
handed in for a missing member. The next lease includes them.

Each verb is one small Lua script. It runs whole or not at all, and it is idempotent: a client that lost the reply sends
the same call again. All times are the server's. The learner, an actor, a judge and people have different verbs:
`learner_buffer`, `actor_buffer`, `judge_buffer`, `people_buffer`.

Damage is a value that no verb writes: a key of another type, a counter that is not a number, a group without its hash.
A learner repairs the books and continues. An actor may not repair, and waits until the learner has done it.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import redis

from slipstream.common.process.redis_retry import NotReady, patiently
from slipstream.common.process.wire import encode
from slipstream.replay.buffer.payloads import strays
from slipstream.replay.records import scripts
from slipstream.replay.records.failures import Quarantined
from slipstream.replay.records.keys import BooksDamaged, FencedOut, RunForgotten

LEARNERS = (
    "acquire_epoch",
    "open",
    "claim",
    "drop",
    "lost",
    "settle",
    "reopen",
    "books",
    "unclaimed",
    "quarantine",
    "repair",
)
ACTORS = ("lease", "heartbeat", "insert", "hand_in", "discard", "condemn", "fail", "release")
JUDGES = ("lease_judging", "renew_judging", "judged", "fail_judging", "release_judging")
PEOPLES = ("quarantine", "requeue", "repair")
BATCH_GROUPS = 256  # the most that one run of a script opens, drops, settles or reopens: other clients wait meanwhile
MAX_QUARANTINED = 16
NO_STEP = 1 << 53  # later than any step, so that no use is taken back

log = logging.getLogger(__name__)

T = TypeVar("T")


class Verbs:
    """The verbs of one kind of client on one stream. `epoch` is the calling learner's, else 0."""

    def __init__(self, client: redis.Redis, run_id: str, base: str, names: Sequence[str]) -> None:
        self.epoch = 0
        self._client = client
        self._run_id = run_id
        self._base = base
        self._scripts = {verb: scripts.load(client, "prelude", "leases", "begin", verb) for verb in names}

    def sha(self, verb: str) -> str:
        """The hash by which the script of `verb` is called."""
        return self._scripts[verb].sha

    def call(self, verb: str, *arguments: Any) -> Any:
        """Run a verb and return its reply. Raises FencedOut, RunForgotten, BooksDamaged, RedisAway."""
        return self._call(verb, [self._base], arguments)

    def commit(self, verb: str, keys: Sequence[str], arguments: Sequence[Any], refusal: redis.ResponseError) -> Any:
        """Retry a verb that the bulk path sent and Redis refused; return its reply. Raises unless a retry can help."""
        if isinstance(refusal, redis.exceptions.NoScriptError) or scripts.is_damage(refusal):
            return self._call(verb, keys, arguments)
        raise refusal

    def quarantine(self, why: Quarantined, *, last_step_made: int = NO_STEP) -> bool:
        """Set a group aside, and return whether it is quarantined now.

        Uses by steps after `last_step_made` are taken back. Past MAX_QUARANTINED, the oldest quarantined group is
        dropped as `poison`.
        """
        epoch = self.epoch or ""
        return bool(self.call("quarantine", epoch, last_step_made, why.group_id, encode(why), MAX_QUARANTINED))

    def repair(self, why: str) -> list[str]:
        """Make the books agree with what is stored; return a line for each repair. Raises BooksDamaged."""
        log.error("the books under %s are damaged; repairing them: %s", self._base, why)
        try:
            repairs: list[bytes] = self._run("repair", [self._base], [self.epoch or ""])
        except scripts.Damaged as damage:
            raise self._beyond_repair(damage) from None
        done = [line.decode(errors="replace") for line in repairs]
        for name in strays(self._client, self._base):
            self._client.unlink(name)
            done.append(f"{name.decode(errors='replace')} belonged to no group: removed")
        for line in done:
            log.error("repaired: %s", line)
        return done

    def _call(self, verb: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        try:
            return self._run(verb, keys, arguments)
        except scripts.Damaged as damage:
            if "repair" not in self._scripts:
                return patiently(self._client, lambda: self._run_once_repaired(verb, keys, arguments))
            self.repair(str(damage))
        try:
            return self._run(verb, keys, arguments)
        except scripts.Damaged as still:
            raise self._beyond_repair(still) from None

    def _run_once_repaired(self, verb: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        try:
            return self._run(verb, keys, arguments)
        except scripts.Damaged as damage:
            raise NotReady(
                f"the keys under {self._base} are damaged; waiting for the learner to repair them: {damage}"
            ) from None

    def _run(self, verb: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        try:
            return self._scripts[verb](keys=keys, args=arguments)
        except scripts.Damaged:
            raise
        except redis.ResponseError as error:
            raise self._refusal(error) from None

    def _beyond_repair(self, damage: Exception) -> BooksDamaged:
        return BooksDamaged(
            f"the keys under {self._base} are damaged, and a repair did not help: {damage}; stop the run, delete the "
            f"keys that begin with {self._base}: and start the learner again; it continues from its checkpoint"
        )

    def _refusal(self, error: redis.ResponseError) -> Exception:
        """The exception for an error reply of a script."""
        if str(error).startswith("FENCEDOUT"):
            return FencedOut(
                f"run {self._run_id}: this learner has epoch {self.epoch} and was {error}; only one learner may train "
                "a run, so this one stops"
            )
        if str(error).startswith("FORGOTTEN"):
            return RunForgotten(
                f"the Redis server has lost run {self._run_id}: it was emptied, or restarted without its data "
                f"({error}). Start the learner again: it continues from its newest checkpoint. docs/replay.md lists "
                "the settings that lose no data"
            )
        return error


def in_batches(rows: list[T]) -> Iterable[list[T]]:
    """The rows, at most BATCH_GROUPS at a time."""
    return (rows[start : start + BATCH_GROUPS] for start in range(0, len(rows), BATCH_GROUPS))
