"""A stretch of an episode: some turns on from where a record of it stands, in a fresh environment that is replayed."""

from dataclasses import dataclass, replace

from actors.group import Stage
from actors.rollout import fresh_env, rollout, spent
from actors.tape import Tape
from common.trajectory import StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Where a stretch ended."""

    record: Trajectory  # a partial unless the episode is over
    is_over: bool


async def play_stretch(tape: Tape, *, stage: Stage, num_turns: int) -> Stretch:
    """Go on with the episode on `tape` for `num_turns`, or to its end. Raises EpisodeFailed, EngineDied.

    An environment that plays its episodes itself has only whole ones.
    """
    allowance = stage.allowance
    max_turns = min(len(tape.turns) + num_turns, allowance.max_turns)
    async with fresh_env(stage.envs, tape.attempt.task, timeout_s=allowance.step_timeout_s) as env:
        trajectory = await rollout(
            tape,
            env=env,
            sampler=stage.engine,
            tokenizer=stage.tokenizer,
            action_format=stage.action_format,
            allowance=replace(allowance, max_turns=max_turns),
        )
    if trajectory.stop_reason is StopReason.DONE or max_turns == allowance.max_turns:
        return Stretch(record=trajectory, is_over=True)
    stop_reason = spent(tape, allowance)  # the stretch may end where the context is full
    if stop_reason is None:
        return Stretch(record=tape.partial(), is_over=False)
    return Stretch(record=tape.trajectory(stop_reason), is_over=True)
