"""Plays a stretch of an episode: some more turns after a recorded state, which is replayed in a fresh environment."""

from dataclasses import dataclass, replace

from actors.group import EpisodeSetup
from actors.reward import rewarded
from actors.rollout import fresh_env, rollout, spent
from actors.tape import Tape
from common.trajectory import StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The end of a stretch."""

    record: Trajectory  # a partial unless the episode is over
    is_over: bool
    actions: tuple[str, ...]  # that the environment received, from the first turn on


async def play_stretch(tape: Tape, *, setup: EpisodeSetup, num_turns: int) -> Stretch:
    """Continue the episode on `tape` for `num_turns`, or to its end. Raises EpisodeFailed, EngineDied.

    It does not work with an environment that runs its episodes itself: those have no stretches.
    """
    allowance = setup.allowance
    max_turns = min(len(tape.turns) + num_turns, allowance.max_turns)
    async with fresh_env(setup.envs, tape.attempt.task, timeout_s=allowance.step_timeout_s) as env:
        trajectory = await rollout(
            tape,
            env=env,
            sampler=setup.engine,
            tokenizer=setup.tokenizer,
            action_format=setup.action_format,
            allowance=replace(allowance, max_turns=max_turns),
            parse=setup.parse,
        )
    if trajectory.stop_reason is not StopReason.DONE and max_turns < allowance.max_turns:
        stop_reason = spent(tape, allowance)  # the stretch may have ended because the context is full
        if stop_reason is None:
            return Stretch(record=tape.partial(), is_over=False, actions=_actions(tape))
        trajectory = tape.trajectory(stop_reason)
    record = await rewarded(trajectory, tape, scoring=setup.scoring)
    return Stretch(record=record, is_over=True, actions=_actions(tape))


def _actions(tape: Tape) -> tuple[str, ...]:
    return tuple(exchange.action for exchange in tape.exchanges)
