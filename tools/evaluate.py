"""`slipstream eval`: measure success on held-out tasks with one engine on this machine, without a run."""

import asyncio
import dataclasses
import json
import logging

from actors.group import EpisodeSetup
from actors.reward import rewarded
from actors.rollout import EpisodeFailed, fresh_env, rollout
from actors.tape import Attempt, Tape
from common.action_format import action_format
from common.config import Config
from common.config_error import ConfigError, require
from common.log import log_to_stderr
from common.long_work import LongWork, report_on_stderr
from common.trajectory import Sampling, Task, Trajectory
from learner.objective.turn_labels import aggregated
from tools.eval_options import EvalOptions
from tools.eval_report import Played, compared, report
from tools.fixed_policy import start_fixed_policy
from tools.state_values import StateValues, reward_model_beside
from tools.table import print_rows

DEFAULT_NUM_TASKS = 100

log = logging.getLogger(__name__)


def evaluate(config: Config, *, options: EvalOptions) -> int:
    """Print success, tokens and more as one JSON line per format, environment and way of sampling.

    The model is `model.path` if given, else the trained model of `run.name`. Several formats play the same tasks, and a
    table of them follows.
    """
    log_to_stderr(logging.WARNING)
    require(
        config.env.enforce_admissible or not options.rank,
        "--rank",
        "empty without env.enforce_admissible=true",
        options.rank,
        "it ranks the actions that this key allows",
    )
    formats = options.compare or (config.env.action_format,)
    with reward_model_beside(config, options.reward_model) as values:
        check_aggregate(values, options.aggregate)
        return evaluate_on(start_fixed_policy(config, name="eval", formats=formats), config, options, values=values)


def evaluate_on(stage: EpisodeSetup, config: Config, options: EvalOptions, *, values: StateValues | None = None) -> int:
    """Play the tasks on `stage`, and print the results. Raises ConfigError if every episode failed."""
    asyncio.run(_evaluate(config, stage, options, values))
    return 0


def check_aggregate(values: StateValues | None, how: str) -> None:
    """Raise ConfigError for a model of outcome, which has one score for an episode, unless `how` is last."""
    if values and how != "last" and not values.scorer.model.is_process:
        raise ConfigError(
            f"`--aggregate` must be last for a reward model of outcome, which has one score for an episode, got {how}; "
            "leave it out, or give a folder of `slipstream prm`"
        )


async def _evaluate(config: Config, stage: EpisodeSetup, options: EvalOptions, values: StateValues | None) -> None:
    formats = {
        name: dataclasses.replace(
            stage,
            action_format=action_format(name, config.env.formats),
            allowance=dataclasses.replace(stage.allowance, rank=options.rank),
        )
        for name in options.compare or (config.env.action_format,)
    }
    ways = (("sampled", config.sampling.temperature, options.attempts, values), ("greedy", 0.0, 1, None))
    tables = []
    try:
        for sampling, temperature, num_attempts, judge in ways:
            for label in stage.envs:
                played = {}
                for name, setup in formats.items():
                    played[name] = await _play_all(label, temperature, num_attempts, config, setup, options, judge)
                    about = {"env": label, "sampling": sampling} | ({"format": name} if options.compare else {})
                    print(json.dumps({**about, **report(played[name])}), flush=True)
                tables.append((f"{label}, {sampling}", *compared(played)))
    finally:
        await stage.engine.close()
    for title, head, rows in tables if options.compare else ():
        print(f"\n{title}: means, and 95 % intervals over tasks")
        print_rows(head, rows)


async def _play_all(
    label: str,
    temperature: float,
    num_attempts: int,
    config: Config,
    setup: EpisodeSetup,
    options: EvalOptions,
    values: StateValues | None,
) -> list[Played]:
    """Play every held-out task of an environment. Raises ConfigError if every episode failed."""
    room = asyncio.Semaphore(config.actors.max_episodes)
    tasks = [
        Task(env=label, split="held_out", index=index) for index in range(config.eval.num_tasks or DEFAULT_NUM_TASKS)
    ]
    work = LongWork(f"episodes of {label}", len(tasks) * num_attempts, report=report_on_stderr)
    episodes = [
        _play(task, member, temperature, config, setup, room, options, work, values)
        for task in tasks
        for member in range(num_attempts)
    ]
    played = [episode for episode in await asyncio.gather(*episodes) if episode is not None]
    if not played:
        raise ConfigError("every episode failed; see the warnings above")
    return played


async def _play(
    task: Task,
    member: int,
    temperature: float,
    config: Config,
    setup: EpisodeSetup,
    room: asyncio.Semaphore,
    options: EvalOptions,
    work: LongWork,
    values: StateValues | None,
) -> Played | None:
    """Play one episode; return None if its environment or engine failed."""
    attempt = Attempt(
        run_id="eval",
        task=task,
        group_id=task.index,
        member=member,
        attempt=0,
        actor="eval",
        sampling=Sampling(temperature=temperature, top_p=1.0, top_k=0, max_turn_tokens=config.sampling.max_turn_tokens),
        seed=config.run.seed,
        provenance=setup.provenance,
    )
    tape = Tape(attempt=attempt)
    try:
        async with room, fresh_env(setup.envs, task, timeout_s=setup.allowance.step_timeout_s) as env:
            trajectory = await rollout(
                tape,
                env=env,
                sampler=setup.engine,
                tokenizer=setup.tokenizer,
                action_format=setup.action_format,
                allowance=setup.allowance,
                parse=setup.parse,
            )
            trajectory = await rewarded(trajectory, tape, scoring=setup.scoring)
    except EpisodeFailed as failure:
        log.warning("%s: %s", task.task_id, failure)
        return None
    finally:
        work.done()
    value = aggregated(await values.of_turns(trajectory), options.aggregate) if values else None
    return _played(trajectory, kind=str(tape.columns.get(options.by, "")), value=value)


def _played(trajectory: Trajectory, *, kind: str, value: float | None) -> Played:
    return Played(
        index=trajectory.task.index,
        kind=kind,
        value=value,
        success=trajectory.success,
        score=trajectory.score,
        num_turns=len(trajectory.turns),
        num_invalid=sum(not turn.valid_action for turn in trajectory.turns),
        num_tokens=trajectory.num_tokens,
        num_written=sum(turn.stop - turn.start for turn in trajectory.turns),
    )
