"""Adds the parts of `env.rewards` to a finished episode, before it is stored."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.answer import Boundary
from slipstream.actors.episode.episode_record import EpisodeRecord, Exchange
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.records.message import Message
from slipstream.common.records.reward_protocol import ScoredEpisode
from slipstream.common.records.trajectory import StopReason, Trajectory
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.offspring import begin_episode, end_offspring
from slipstream.envhub.rewards.episode import Episode, EpisodeTurn, Values
from slipstream.envhub.rewards.part import Part, composed, group_parts, shown_columns
from slipstream.envhub.rewards.sibling_judge import show
from slipstream.envhub.together import together

HELD_OUT = "held_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """What is needed to score the episodes of an actor."""

    parts: dict[str, tuple[Part, ...]]  # by `Task.env`
    tokenizer: PreTrainedTokenizerBase
    allowance: Allowance  # of the run: a stretch of an episode may have a smaller one

    def parts_for(self, trajectory: Trajectory) -> tuple[Part, ...]:
        """The parts that count for an episode. Of a held-out task only the score matters.

        Those that compare whole groups are among them: they measure nothing here, and a judge computes them later.
        """
        parts = self.parts.get(trajectory.task.env, ())
        if trajectory.task.split == HELD_OUT:
            return tuple(part for part in parts if part.success_from is not None)
        return parts


async def rewarded(trajectory: Trajectory, record: EpisodeRecord, *, scoring: Scoring | None) -> Trajectory:
    """The finished episode of `record` with the reward that its parts compose; itself if it has none.

    Needs no environment, and the engine only for a judge that is the run's own policy. Raises EpisodeFailed if a part
    fails, EngineDied if that engine died.
    """
    if scoring is None or not (parts := scoring.parts_for(trajectory)):
        return trajectory
    started, mark = time.perf_counter(), begin_episode()
    try:
        episode = _episode(trajectory, record, scoring)
        compared = group_parts(parts)
        alone = tuple(part for part in parts if not part.compare)
        result = composed(episode, alone, await _measured(episode, alone, scoring.allowance.step_timeout_s))
        columns = sorted({name for part, _ in compared for name in shown_columns(part)})
        shown = show(episode, columns) if compared else ""
    except EnvError as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, str(error)) from error
    finally:
        await asyncio.shield(asyncio.to_thread(end_offspring, mark))
    turns = [
        msgspec.structs.replace(turn, rewards=rewards)
        for turn, rewards in zip(trajectory.turns, result.rewards, strict=True)
    ]
    return msgspec.structs.replace(
        trajectory,
        turns=turns,
        score=result.score,
        success=result.success,
        part_values=result.values,
        shown=shown,
        scoring_s=time.perf_counter() - started,
    )


async def _measured(episode: Episode, parts: Sequence[Part], timeout_s: float) -> list[Values]:
    """What each part measures: first the one that is the score, as others may depend on success.

    Raises the error of the first that fails; the others then end.
    """
    first = [part for part in parts if part.success_from is not None]
    others = [part for part in parts if part.success_from is None]
    values = await together(_values(part, episode, timeout_s) for part in first)
    for part, found in zip(first, values, strict=True):
        episode = part.scored(episode, found)
    values += await together(_values(part, episode, timeout_s) for part in others)
    by_name = {part.name: found for part, found in zip([*first, *others], values, strict=True)}
    return [by_name[part.name] for part in parts]


async def _values(part: Part, episode: Episode, timeout_s: float) -> Values:
    try:
        with Boundary():  # in this task: a SystemExit that left it would end the actor
            return await part.values(episode, timeout_s=timeout_s)
    except EnvError as error:
        if isinstance(error.__cause__, EngineDied):  # of a judge that is the run's own policy: no attempt fails
            raise error.__cause__ from None
        raise EnvError(f"`{part.key}`: {error}") from error


def _episode(trajectory: Trajectory, record: EpisodeRecord, scoring: Scoring) -> Episode:
    opening, exchanges = record.opening, record.exchanges
    if not opening:  # the environment renders prompts itself, so there are only tokens
        opening, exchanges = _decoded(trajectory, scoring.tokenizer)
    messages = list(opening)
    for exchange in exchanges:
        messages += [Message("assistant", exchange.reply), *exchange.answer]
    ending = exchanges[-1].answer
    plain = [{"role": message.role, "content": message.content} for message in messages]
    return Episode(
        task=trajectory.task,
        columns=record.columns,
        prompt=plain[: len(opening)],
        messages=plain[: len(plain) - len(ending)],
        ending=plain[len(plain) - len(ending) :],
        turns=[
            EpisodeTurn(
                reply=exchange.reply,
                action=exchange.action,
                valid_action=turn.valid_action,
                answer="\n".join(message.content for message in exchange.answer),
                rewards=dict(turn.rewards),
                state_key=turn.state_key,
                num_tokens=turn.stop - turn.start,
                finish_reason=turn.finish_reason,
            )
            for turn, exchange in zip(trajectory.turns, exchanges, strict=True)
        ],
        max_turns=scoring.allowance.max_turns,
        score=trajectory.score,
        success=trajectory.success,
        stop_reason=trajectory.stop_reason.value,
        completion_ids=trajectory.token_array()[trajectory.turns[0].start : trajectory.turns[-1].stop].tolist(),
        scored=ScoredEpisode.of(trajectory),
    )


def _decoded(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[Message, ...], list[Exchange]]:
    """The first prompt, and each reply with the prompt after it, as the tokenizer decodes them."""
    tokens, turns = trajectory.token_array().tolist(), trajectory.turns
    starts = [*(turn.start for turn in turns[1:]), turns[-1].stop]
    exchanges = []
    for turn, start in zip(turns, starts, strict=True):
        between = str(tokenizer.decode(tokens[turn.stop : start]))
        reply = str(tokenizer.decode(tokens[turn.start : turn.stop], skip_special_tokens=True))
        answer = (Message("user", between),) if between else ()
        exchanges.append(Exchange(reply=reply, action=reply, answer=answer))
    return (Message("user", str(tokenizer.decode(tokens[: turns[0].start]))),), exchanges
