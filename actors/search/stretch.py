"""Plays a stretch of an episode: some more turns after a recorded state, which is restored or replayed."""

from dataclasses import dataclass, replace

from slipstream.actors.engine.engine import Sampler
from slipstream.actors.episode.episode_record import EpisodeRecord, Exchange
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.rollout import rollout
from slipstream.actors.group.episode_reward import rewarded
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.search.search_env import Saved, SearchEnv
from slipstream.common.records.trajectory import StopReason, Trajectory
from slipstream.envhub.driving import DrivingEnv


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The end of a stretch."""

    record: Trajectory  # a partial unless the episode is over
    is_over: bool
    exchanges: tuple[Exchange, ...]  # from the first turn on
    saved: Saved | None = None  # the state at the end; None if the episode is over, or the actions must be replayed

    @property
    def actions(self) -> tuple[str, ...]:
        """Those that the environment received, from the first turn on."""
        return tuple(exchange.action for exchange in self.exchanges)


async def play_stretch(
    record: EpisodeRecord,
    *,
    setup: EpisodeSetup,
    num_turns: int,
    begin: Saved | None = None,
    hint: str = "",
    sampler: Sampler | None = None,
) -> Stretch:
    """Continue the episode on `record` for `num_turns`, or to its end. Raises EpisodeFailed, EngineDied.

    `begin` is the state of the environment after the turns on `record`; without, their actions are replayed. The first
    messages end with `hint`. `sampler` plays instead of the engine of `setup`. It does not work with an environment
    that runs its episodes itself: those have no stretches.
    """
    allowance = setup.allowance
    max_turns = min(len(record.turns) + num_turns, allowance.max_turns)
    async with fresh_env(setup.envs, record.attempt.task, timeout_s=allowance.step_timeout_s) as env:
        if not isinstance(env, DrivingEnv):
            num_steps = num_turns if max_turns < allowance.max_turns else 0  # nothing follows the last turn
            env = SearchEnv(env, begin=begin, num_steps=num_steps, hint=hint, lists_actions=allowance.shows_admissible)
        trajectory = await rollout(
            record,
            env=env,
            sampler=sampler or setup.engine,
            tokenizer=setup.tokenizer,
            action_format=setup.action_format,
            allowance=replace(allowance, max_turns=max_turns),
            parse=setup.parse,
        )
    if trajectory.stop_reason is not StopReason.DONE and max_turns < allowance.max_turns:
        stop_reason = allowance.spent(record)  # the stretch may have ended because the context is full
        if stop_reason is None:
            saved = env.saved if isinstance(env, SearchEnv) else None
            return Stretch(record=record.partial(), is_over=False, exchanges=tuple(record.exchanges), saved=saved)
        trajectory = record.trajectory(stop_reason)
    trajectory = await rewarded(trajectory, record, scoring=setup.scoring)
    return Stretch(record=trajectory, is_over=True, exchanges=tuple(record.exchanges))
