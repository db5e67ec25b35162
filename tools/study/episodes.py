"""Groups and held-out episodes for studies, rolled out in this process by the actors' own rollout."""

import asyncio
import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from actors.rollout import Allowance, fresh_env, rollout
from actors.tape import Attempt, Tape
from common.action_format import FORMATS
from common.config import Config
from common.trajectory import Provenance, Sampling, Task, Trajectory
from learner.objective.advantage import returns_differ
from learner.curriculum import Curriculum
from learner.supply import Batch, spread, ticket_of
from replay.ticket import Group, Ticket
from tools.study.sampler import LockstepSampler

MAX_WAVES = 10  # each of as many episodes as there are slots
UNHURRIED_S = 1e6  # a study that was suspended goes on where it was


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What every episode of a study is played with."""

    config: Config
    sampler: LockstepSampler
    tokenizer: PreTrainedTokenizerBase
    runner: asyncio.Runner


class NothingToLearn(RuntimeError):
    """Attempt after attempt had the same return as its siblings: the policy has collapsed, or solves every task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Harvest:
    """What was rolled out for one optimizer step."""

    batch: Batch
    success: float  # over all episodes that were played, those without a use included


def harvest(stage: Stage, *, first_group_id: int, policy_version: int) -> Harvest:
    """Roll out groups until `replay.groups_per_step` are of use; the first of them, by id, are the batch.

    Of use are, where siblings are compared, those whose returns differ; of the candidates that `replay.keep_fraction`
    asks for, those are taken whose returns lie furthest apart. After MAX_WAVES batches of episodes the step is made of
    what there is. Every member is sampled by the weights that the sampler has, which are `policy_version`.
    Raises NothingToLearn.
    """
    config = stage.config
    wanted = math.ceil(config.replay.groups_per_step / config.replay.keep_fraction)
    room = stage.sampler.num_slots // config.replay.group_size
    curriculum = Curriculum(config.env, seed=config.run.seed)
    played: list[Group] = []
    useful: list[Group] = []
    for _ in range(MAX_WAVES):
        ids = range(first_group_id + len(played), first_group_id + len(played) + room)
        tickets = [
            ticket_of(group_id, curriculum.task(group_id), config, min_policy_version=policy_version)
            for group_id in ids
        ]
        groups = _rolled_out(tickets, stage)
        played += groups
        useful += [group for group in groups if _of_use(group, config)]
        if len(useful) >= wanted:
            break
    if not useful:
        raise NothingToLearn(f"{len(played)} groups, and in none did the returns of siblings differ")
    chosen = sorted(useful[:wanted], key=lambda group: -spread(group))[: config.replay.groups_per_step]
    episodes = [trajectory for group in played for trajectory in group.trajectories]
    batch = Batch(
        groups=sorted(chosen, key=lambda group: group.ticket.group_id),
        num_dropped={"zero_variance": len(played) - len(useful), "surplus": len(useful) - len(chosen)},
        next_group_id=first_group_id + len(played),
    )
    return Harvest(batch=batch, success=sum(each.success for each in episodes) / len(episodes))


def _of_use(group: Group, config: Config) -> bool:
    returns = [trajectory.total_reward for trajectory in group.trajectories]
    return not config.objective.compares_siblings or returns_differ(returns)


def held_out_success(stage: Stage, *, num_tasks: int) -> float:
    """The fraction of the first `num_tasks` held-out tasks that are solved, sampled once each."""
    config, room = stage.config, stage.sampler.num_slots
    tasks = [Task(env=config.env.name, split="held_out", index=index) for index in range(num_tasks)]
    sampling = ticket_of(0, tasks[0], config, min_policy_version=0).sampling
    attempts = [_attempt(task, config, sampling, group_id=task.index, member=0) for task in tasks]
    played = [
        trajectory
        for start in range(0, num_tasks, room)
        for trajectory in stage.runner.run(_play_all(attempts[start : start + room], stage))
    ]
    return sum(trajectory.success for trajectory in played) / num_tasks


def _rolled_out(tickets: Sequence[Ticket], stage: Stage) -> list[Group]:
    attempts = [
        _attempt(ticket.task, stage.config, ticket.sampling, group_id=ticket.group_id, member=member)
        for ticket in tickets
        for member in range(ticket.num_members)
    ]
    played = iter(stage.runner.run(_play_all(attempts, stage)))
    return [
        Group(ticket=ticket, num_uses=1, trajectories=[next(played) for _ in range(ticket.num_members)])
        for ticket in tickets
    ]


def _attempt(task: Task, config: Config, sampling: Sampling, *, group_id: int, member: int) -> Attempt:
    return Attempt(
        run_id=config.run.name,
        task=task,
        group_id=group_id,
        member=member,
        attempt=0,
        actor="study",
        sampling=sampling,
        seed=config.run.seed,
        provenance=Provenance(host=socket.gethostname(), instance_kind="reserved", price_per_hour=0.0),
    )


async def _play_all(attempts: Sequence[Attempt], stage: Stage) -> list[Trajectory]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_play(attempt, stage)) for attempt in attempts]
    return [task.result() for task in tasks]


async def _play(attempt: Attempt, stage: Stage) -> Trajectory:
    """One episode. Raises EpisodeFailed where the environment fails: nobody is there to redo it."""
    env_config = stage.config.env
    with stage.sampler.seat() as seat:
        async with fresh_env(env_config.parts(), attempt.task, timeout_s=env_config.step_timeout_s) as env:
            return await rollout(
                Tape(attempt=attempt),
                env=env,
                sampler=seat,
                tokenizer=stage.tokenizer,
                action_format=FORMATS[env_config.action_format],
                allowance=Allowance(
                    max_turns=env_config.max_turns,
                    max_tokens=stage.config.model.max_tokens,
                    step_timeout_s=UNHURRIED_S,
                    episode_timeout_s=UNHURRIED_S,
                ),
            )
