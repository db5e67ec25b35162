"""`slipstream eval`: measure success on held-out tasks with one engine on this machine, without a run."""

import asyncio
import json
import logging

from actors.group import EpisodeSetup
from actors.reward import rewarded
from actors.rollout import EpisodeFailed, rollout
from actors.tape import Attempt, Tape
from common.config import Config
from common.config_error import ConfigError
from common.log import log_to_stderr
from common.trajectory import Sampling, Task, Trajectory
from envhub.catalogue import make_any_env
from tools.fixed_policy import start_fixed_policy

DEFAULT_NUM_TASKS = 100

log = logging.getLogger(__name__)


def evaluate(config: Config) -> int:
    """Print success, score and turns as one JSON line per environment and way of sampling.

    The model is `model.path` if given, else the trained model of `run.name`.
    """
    log_to_stderr(logging.WARNING)
    asyncio.run(_evaluate(config, start_fixed_policy(config, name="eval")))
    return 0


async def _evaluate(config: Config, stage: EpisodeSetup) -> None:
    num_tasks = config.eval.num_tasks or DEFAULT_NUM_TASKS
    try:
        for name, temperature in (("sampled", config.sampling.temperature), ("greedy", 0.0)):
            room = asyncio.Semaphore(config.actors.max_episodes)
            for label in stage.envs:
                tasks = [Task(env=label, split="held_out", index=index) for index in range(num_tasks)]
                attempts = [_play(task, temperature, config, stage, room) for task in tasks]
                played = [trajectory for trajectory in await asyncio.gather(*attempts) if trajectory is not None]
                if not played:
                    raise ConfigError("every episode failed; see the warnings above")
                print(json.dumps({"env": label, "sampling": name, **_means(played)}), flush=True)
    finally:
        await stage.engine.close()


async def _play(
    task: Task, temperature: float, config: Config, stage: EpisodeSetup, room: asyncio.Semaphore
) -> Trajectory | None:
    """Play one episode; return None if its environment or engine failed."""
    attempt = Attempt(
        run_id="eval",
        task=task,
        group_id=task.index,
        member=0,
        attempt=0,
        actor="eval",
        sampling=Sampling(temperature=temperature, top_p=1.0, top_k=0, max_turn_tokens=config.sampling.max_turn_tokens),
        seed=config.run.seed,
        provenance=stage.provenance,
    )
    async with room:
        env = make_any_env(stage.envs[task.env].name, stage.envs[task.env].options)
        tape = Tape(attempt=attempt)
        try:
            trajectory = await rollout(
                tape,
                env=env,
                sampler=stage.engine,
                tokenizer=stage.tokenizer,
                action_format=stage.action_format,
                allowance=stage.allowance,
            )
            return await rewarded(trajectory, tape, scoring=stage.scoring)
        except EpisodeFailed as failure:
            log.warning("%s: %s", task.task_id, failure)
            return None
        finally:
            await env.close()


def _means(played: list[Trajectory]) -> dict[str, float]:
    count = len(played)
    return {
        "num_tasks": count,
        "success": sum(trajectory.success for trajectory in played) / count,
        "score": sum(trajectory.score for trajectory in played) / count,
        "turns": sum(len(trajectory.turns) for trajectory in played) / count,
        "tokens": sum(trajectory.num_tokens for trajectory in played) / count,
    }
