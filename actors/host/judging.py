"""Marks the complete groups of a run, for the parts of `env.rewards` that compare siblings.

`slipstream serve judge` is a process that does so. It needs Redis and the judges' servers. It has no engine, no
environment and no tokenizer: actors store what a judge sees. Actors continue meanwhile: a group that waits for its
marks has no lease of theirs and no place in an engine. If the run's own policy is a judge, each actor does the same
beside its episodes, and there is no such process.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.actors.host.join import fleet_of, is_over, process_name, run_config, wait_for_run
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import LEAVE_S, Shutdown
from slipstream.common.records.trajectory import Trajectory
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import Part, actors_judge, book_on, check_keys, group_parts, reward_parts
from slipstream.envhub.rewards.sibling_judge import read_shown, sibling_marks
from slipstream.replay.buffer.judge_buffer import JudgeBuffer, Judging
from slipstream.replay.fleet.judge_account import JudgeAccount
from slipstream.replay.records.ticket import Marks, Verdict

MAX_GROUPS = 32  # judged at a time by a process; `max_concurrent` of a judge limits the requests
POLL_S = 0.2
RENEW_S = 1.0
RETRY_S = 10.0  # after a judging that failed, with all the attempts of its requests

log = logging.getLogger(__name__)

Compared = list[tuple[Part, Judge]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSetup:
    """What a judge process works with, or an actor that judges."""

    name: str
    buffer: JudgeBuffer
    parts: dict[str, Compared]  # by `Task.env`
    retry_s: float = RETRY_S
    interval: PollInterval = field(default_factory=PollInterval)
    may_judge: Callable[[int], bool] = lambda oldest: True
    """Whether it can judge one more group now, whose oldest allowed policy version this is."""


def judge(config: Config) -> int:
    """Judge groups until the run is over or a signal asks to leave; return the exit code. Raises ConfigError."""
    log_to_stderr()
    shutdown = Shutdown()
    with shutdown.nothing_to_lose():
        fleet = fleet_of(config, shutdown)
        facts = wait_for_run(fleet, config.actors.join_timeout_s)
        run = run_config(facts)
        all_parts = reward_parts(run.env.entries())
        if actors_judge(all_parts.values()):
            raise ConfigError(
                f"the actors of run {run.run.name!r} judge its groups, as the run's own policy is one of the judges "
                "(`url: actors`); start `slipstream actors` instead"
            )
        check_keys(all_parts, of_groups=True)
    client = connect(config.redis.url, ending=shutdown.requested)
    book_on(JudgeAccount(client, run.run.name).add, all_parts.values())
    parts = {env: group_parts(of_env) for env, of_env in all_parts.items()}
    setup = JudgeSetup(
        name=f"judge-{process_name()}",
        buffer=JudgeBuffer(client, run.run.name, run.replay, vocab_size=facts.vocab_size),
        parts=parts,
    )
    # Groups from before a resume with other rewards become ready without marks.
    if not any(parts.values()) and not any_waits(setup):
        raise ConfigError(
            f"run {run.run.name!r} has no judge of whole groups, so there is nothing to do; a part of `env.rewards` is "
            "one if it is a judge with `compare: listwise`"
        )
    shutdown.end_within(LEAVE_S)
    try:
        asyncio.run(keep_judging(setup, is_done=lambda: shutdown.requested.is_set() or is_over(fleet)))
    except RedisAway as error:
        log.error("the judge ends; start it again when the server is back: %s", error)
        return 1
    return shutdown.exit_code


def any_waits(setup: JudgeSetup) -> bool:
    """Return whether a group waits for a judge. An actor's role may not read the books, so this leases one."""
    leased = setup.buffer.lease(setup.name)
    if leased is not None:
        setup.buffer.release(leased)
    return leased is not None


async def keep_judging(setup: JudgeSetup, *, is_done: Callable[[], bool]) -> None:
    """Judge groups until `is_done`, several at a time.

    Consumes complete groups that wait for a judge, and waits for the judges. Produces verdicts, each of which makes a
    group ready. A group is given back if this ends or is cancelled before its verdict: no judging counts as failed,
    except one whose error ends this, as the death of an engine does. Raises RedisAway, and such an error.
    """
    judging: dict[asyncio.Task[None], Judging] = {}
    buffer = setup.buffer
    renewing = asyncio.create_task(_keep_renewing(setup, judging))
    oldest = 0  # allowed version of the group that was seen last: those after it are seldom older
    try:
        while not await asyncio.to_thread(is_done):
            while len(judging) < MAX_GROUPS and setup.may_judge(oldest):
                leased = await _leased(buffer, setup.name)
                if leased is None:
                    break
                oldest = leased.ticket.min_policy_version
                if not setup.may_judge(oldest):
                    await asyncio.to_thread(buffer.release, leased)
                    break
                judging[asyncio.create_task(_judge(setup, leased))] = leased
            await asyncio.sleep(setup.interval.seconds(POLL_S))
            for task in [task for task in judging if task.done()]:
                if not task.cancelled():
                    task.result()  # if it raises, the group is still among those that are given back
                del judging[task]
            if renewing.done():
                renewing.result()
    finally:
        for task in (renewing, *judging):
            task.cancel()
        await asyncio.gather(renewing, *judging, return_exceptions=True)
        for task, leased in judging.items():
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, RedisAway):
                # A group that kills its judges must not kill all of them.
                await asyncio.to_thread(buffer.fail, leased, wait_s=0, reason=str(error) or repr(error))
            else:
                await asyncio.to_thread(buffer.release, leased)


async def _leased(buffer: JudgeBuffer, judge: str) -> Judging | None:
    """Lease a group; if this is cancelled meanwhile, give it back."""
    leasing = asyncio.create_task(asyncio.to_thread(buffer.lease, judge))
    try:
        return await asyncio.shield(leasing)
    except asyncio.CancelledError:
        if leased := await leasing:
            await asyncio.to_thread(buffer.release, leased)
        raise


async def _judge(setup: JudgeSetup, leased: Judging) -> None:
    """Store a verdict on one group, or report that the judging failed."""
    group_id = leased.ticket.group_id
    try:
        verdict = await verdict_of(leased.trajectories, setup.parts.get(leased.ticket.task.env, []), judge=setup.name)
    except EnvError as error:
        is_repeated = await asyncio.to_thread(setup.buffer.fail, leased, wait_s=setup.retry_s, reason=str(error))
        then = f"again in {setup.retry_s:g} s" if is_repeated else "for the last time: the group is dropped"
        log.warning("group %d could not be judged, %s: %s", group_id, then, error)
        return
    result = await asyncio.to_thread(setup.buffer.store, leased, verdict)
    log.info("group %d is judged: %s", group_id, result.value)


async def verdict_of(trajectories: Sequence[Trajectory], parts: Compared, *, judge: str) -> Verdict:
    """Return what `parts` give each member of a group. Raises EnvError, with the key of the part, if one fails."""
    members = [Marks(values={}, rewards={}) for _ in trajectories]
    if not parts:
        return Verdict(judge=judge, members=members)
    shown = [read_shown(trajectory) for trajectory in trajectories]
    for part, model in parts:
        try:
            marks = await sibling_marks(model, shown)
        except EnvError as error:
            raise EnvError(f"`{part.key}`: {error}") from error
        for trajectory, member, mark in zip(trajectories, members, marks, strict=True):
            if part.name in trajectory.turns[-1].rewards or part.name in trajectory.part_values:
                raise EnvError(f"`{part.key}`: the environment has a reward of this name; choose another name")
            value = part.limited(mark.value)
            member.values[part.name] = value
            member.values.update(mark.version_under(part.name))
            member.rewards[part.name] = part.weight * value
    return Verdict(judge=judge, members=members)


async def _keep_renewing(setup: JudgeSetup, judging: dict[asyncio.Task[None], Judging]) -> None:
    """Renew the leases; end the work on groups whose lease was lost: another judge may have them already."""
    while True:
        mine = dict(judging)
        valid_ids = await asyncio.to_thread(setup.buffer.renew, setup.name, list(mine.values())) if mine else set()
        for task, leased in mine.items():
            if leased.ticket.group_id not in valid_ids:
                task.cancel()
        await asyncio.sleep(setup.interval.seconds(RENEW_S))
