"""Rolls out groups and held-out episodes for studies in this process, with the same rollout as the actors use."""

import asyncio
import math
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.resume import forked_record
from slipstream.actors.episode.rollout import rollout
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.actors.group.siblings import parent_among
from slipstream.common.config.config import Config
from slipstream.common.records.trajectory import Provenance, Sampling, Task, Trajectory
from slipstream.common.text.action_format import format_of
from slipstream.envhub.rewards.part import reward_parts
from slipstream.learner.batch.batch import Batch
from slipstream.learner.credit.grpo import returns_differ
from slipstream.learner.supply.curriculum import Curriculum
from slipstream.learner.supply.supply import spread, ticket_of
from slipstream.replay.records.forks import awaited
from slipstream.replay.records.ticket import Group, Ticket
from slipstream.tools.lab.study.sampler import LockstepSampler

MAX_WAVES = 10  # each has one episode per slot
UNHURRIED_S = 1e6  # no timeout: a study may be suspended and continued


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySetup:
    """What all episodes of a study share."""

    config: Config
    sampler: LockstepSampler
    tokenizer: PreTrainedTokenizerBase
    runner: asyncio.Runner


class NothingToLearn(RuntimeError):
    """In every group all siblings had the same return: the policy has collapsed, or solves every task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvest:
    """The episodes that were rolled out for one optimizer step."""

    batch: Batch
    success: float  # over all episodes, including those of groups that are not in the batch


def harvest(setup: StudySetup, *, first_group_id: int, policy_version: int) -> Harvest:
    """Roll out groups until `replay.groups_per_step` are useful; the first useful ones, by id, are the batch.

    If the objective compares siblings, a group is useful only if its returns differ. `replay.keep_fraction` may require
    more candidates; then the groups with the largest spread of returns are taken. After MAX_WAVES waves of episodes,
    the batch has the useful groups so far. The sampler's weights must be `policy_version`. Raises NothingToLearn.
    """
    config = setup.config
    wanted = math.ceil(config.replay.groups_per_step / config.replay.keep_fraction)
    room = setup.sampler.num_slots // config.replay.group_size
    curriculum = Curriculum(config.env, seed=config.run.seed)
    played: list[Group] = []
    useful: list[Group] = []
    for _ in range(MAX_WAVES):
        ids = range(first_group_id + len(played), first_group_id + len(played) + room)
        tickets = [
            ticket_of(group_id, curriculum.choose(group_id), config, min_policy_version=policy_version)
            for group_id in ids
        ]
        groups = _rolled_out(tickets, setup)
        played += groups
        useful += [group for group in groups if _is_useful(group, config)]
        if len(useful) >= wanted:
            break
    if not useful:
        raise NothingToLearn(f"in none of {len(played)} groups did the returns of siblings differ")
    chosen = sorted(useful[:wanted], key=lambda group: -spread(group))[: config.replay.groups_per_step]
    episodes = [trajectory for group in played for trajectory in group.trajectories]
    batch = Batch(
        groups=sorted(chosen, key=lambda group: group.ticket.group_id),
        num_dropped={"zero_variance": len(played) - len(useful), "surplus": len(useful) - len(chosen)},
        next_group_id=first_group_id + len(played),
    )
    return Harvest(batch=batch, success=sum(each.success for each in episodes) / len(episodes))


def _is_useful(group: Group, config: Config) -> bool:
    returns = [trajectory.total_reward for trajectory in group.trajectories]
    takes_all = not (config.objective.compares_siblings and config.replay.drop_zero_variance)
    return takes_all or returns_differ(returns)


def held_out(setup: StudySetup, *, num_tasks: int) -> float:
    """The success of one sampled episode of each of the first `num_tasks` held-out tasks."""
    tasks = [Task(env=setup.config.env.name, split="held_out", index=index) for index in range(num_tasks)]
    config, room = setup.config, setup.sampler.num_slots
    sampling = ticket_of(0, tasks[0], config, min_policy_version=0).sampling
    records = [EpisodeRecord(attempt=_attempt(task, config, sampling, group_id=task.index, member=0)) for task in tasks]
    return statistics.fmean(
        trajectory.success
        for start in range(0, len(records), room)
        for trajectory in setup.runner.run(_play_all(records[start : start + room], setup))
    )


def _rolled_out(tickets: Sequence[Ticket], setup: StudySetup) -> list[Group]:
    """Play all members of the groups; those that fork from others after these."""
    played: list[dict[int, Trajectory]] = [{} for _ in tickets]
    while records := [
        record for ticket, stored in zip(tickets, played, strict=True) for record in _ready(ticket, stored, setup)
    ]:
        for record, trajectory in zip(records, setup.runner.run(_play_all(records, setup)), strict=True):
            played[record.attempt.group_id - tickets[0].group_id][record.attempt.member] = trajectory
    return [
        Group(ticket=ticket, num_uses=1, trajectories=[stored[member] for member in range(ticket.num_members)])
        for ticket, stored in zip(tickets, played, strict=True)
    ]


def _ready(ticket: Ticket, stored: Mapping[int, Trajectory], setup: StudySetup) -> list[EpisodeRecord]:
    """The records of the members that can be played now: those whose `awaited` are all `stored`."""
    before, records = awaited(ticket), []
    for member in range(ticket.num_members):
        if member in stored or not stored.keys() >= set(before.get(member, ())):
            continue
        attempt = _attempt(ticket.task, setup.config, ticket.sampling, group_id=ticket.group_id, member=member)
        forked = parent_among(stored, member, ticket=ticket)
        records.append(forked_record(attempt, *forked) if forked else EpisodeRecord(attempt=attempt))
    return records


def _attempt(task: Task, config: Config, sampling: Sampling, *, group_id: int, member: int) -> Attempt:
    return Attempt(
        run_id=config.run.name,
        task=task,
        group_id=group_id,
        member=member,
        actor="study",
        sampling=sampling,
        seed=config.run.seed,
        provenance=Provenance(host=socket.gethostname(), instance_kind="reserved", price_per_hour=0.0),
    )


async def _play_all(records: Sequence[EpisodeRecord], setup: StudySetup) -> list[Trajectory]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_play(record, setup)) for record in records]
    return [task.result() for task in tasks]


async def _play(record: EpisodeRecord, setup: StudySetup) -> Trajectory:
    """Play one episode. Raises EpisodeFailed if the environment fails, as a study does not redo episodes."""
    env_config, attempt = setup.config.env, record.attempt
    allowance = replace(Allowance.of(setup.config), step_timeout_s=UNHURRIED_S, episode_timeout_s=UNHURRIED_S)
    scoring = Scoring(parts=reward_parts(env_config.entries()), tokenizer=setup.tokenizer, allowance=allowance)
    with setup.sampler.seat() as seat:
        async with fresh_env(env_config.entries(), attempt.task, timeout_s=env_config.step_timeout_s) as env:
            trajectory = await rollout(
                record,
                env=env,
                sampler=seat,
                tokenizer=setup.tokenizer,
                action_format=format_of(env_config),
                allowance=allowance,
            )
    return await rewarded(trajectory, record, scoring=scoring)
