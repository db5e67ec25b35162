"""Plays one episode, from `reset` to its record. It records facts only; the learner computes advantages from them.

What a run adds to an episode is around this loop. The limit of a thought is a sampler; a search's snapshots and hints
are an environment; a preempted episode continues as its record says (`resume`).
"""

import asyncio
import time

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, EngineDied, EngineError, Sampler
from slipstream.actors.episode.actions import Actions
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.answer import CheckedEnv, in_tokens
from slipstream.actors.episode.drive import drive
from slipstream.actors.episode.episode_record import EpisodeRecord, Exchange, ReplayMismatch
from slipstream.actors.episode.thought_limit import ThoughtLimit
from slipstream.common.records.trajectory import OUTCOME_OF, StopReason, Trajectory
from slipstream.common.text.action_format import ActionFormat
from slipstream.common.text.chat import Chat
from slipstream.envhub.driving import DrivingEnv, Parse
from slipstream.envhub.env import Env, EnvError

MAX_WHY_CHARS = 4000


class EpisodeFailed(RuntimeError):
    """The episode ended for a reason other than the policy. It has no reward, and is redone."""

    def __init__(self, stop_reason: StopReason, why: str) -> None:
        # Without half surrogate pairs, which cannot be sent to Redis.
        super().__init__(why[:MAX_WHY_CHARS].encode(errors="backslashreplace").decode())
        self.stop_reason = stop_reason
        self.outcome = OUTCOME_OF[stop_reason]


async def _play(
    record: EpisodeRecord, env: CheckedEnv, sampler: Sampler, actions: Actions, allowance: Allowance
) -> StopReason:
    """Reset, then generate, parse, step and record, until the task is over or an allowance is used up.

    The turns that `record` has already are replayed: their tokens are not sampled again.
    """
    chat, first = actions.chat, await env.reset(record.attempt.task)
    record.opening, record.columns = await actions.opening(first), first.columns
    record.add_prompt(in_tokens(actions.open, record.opening))
    while (stop_reason := allowance.spent(record)) is None:
        if chat.is_summarising:
            await _summarise(record, sampler, chat)
            continue
        state_key, prompt, started = env.state_key(), record.prompt(), time.perf_counter()
        completion = record.replayed(state_key) or await _sampled(record, sampler)
        reply = chat.reply(completion.tokens)
        action = await actions.read(reply, tokens=completion.tokens, prompt=prompt)
        generated = time.perf_counter()
        observation = await env.step(action.text)
        env_s = time.perf_counter() - generated
        answer = await actions.shown(action, observation)
        record.add_turn(
            completion,
            observation,
            Exchange(reply=reply, action=action.text, answer=answer),
            state_key=state_key,
            valid_action=action.valid,
            generate_s=generated - started,
            env_s=env_s,
        )
        if observation.done:
            return StopReason.DONE
        record.add_prompt(in_tokens(chat.extend, answer))
    return stop_reason


async def _sampled(record: EpisodeRecord, sampler: Sampler) -> Completion:
    """What the policy writes in the next turn."""
    attempt = record.attempt
    seed = attempt.turn_seed(len(record.turns))
    completion = await sampler.generate(record.prompt(), attempt.sampling, seed=seed)
    record.add_completion(completion)
    return completion


async def _summarise(record: EpisodeRecord, sampler: Sampler, chat: Chat) -> None:
    """Have the policy summarise the episode so far: a turn without an action, trained like the others."""
    started = time.perf_counter()
    completion = record.replayed("") or await _sampled(record, sampler)
    record.add_summary(completion, chat.reply(completion.tokens), generate_s=time.perf_counter() - started)
    record.add_prompt(in_tokens(chat.extend, ()))


async def rollout(
    record: EpisodeRecord,
    *,
    env: Env | DrivingEnv,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    action_format: ActionFormat,
    allowance: Allowance,
    parse: Parse | None = None,
) -> Trajectory:
    """Play one episode to its end, from the current end of `record`.

    Raises EpisodeFailed if it ended for a reason other than the policy, and EngineDied if no other episode can continue
    either. If this is cancelled, the record has everything so far.
    """
    if allowance.max_thought_tokens:
        sampler = ThoughtLimit(sampler, tokenizer, allowance)
    try:
        async with asyncio.timeout(allowance.episode_timeout_s):
            if isinstance(env, DrivingEnv):
                return await drive(
                    record, env=env, sampler=sampler, tokenizer=tokenizer, allowance=allowance, parse=parse
                )
            checked = CheckedEnv(env, timeout_s=allowance.step_timeout_s)
            actions = Actions(
                env=checked,
                chat=Chat(tokenizer, model=allowance.model, started_at_s=record.started_at_s),
                action_format=action_format,
                parse=parse,
                shows=allowance.shows_admissible,
            )
            stop_reason = await _play(record, checked, sampler, actions, allowance)
            if not record.turns:
                raise EnvError(
                    f"its first prompt of {len(record.tokens)} tokens leaves no room in `model.max_tokens` = "
                    f"{allowance.max_tokens}"
                )
            return record.trajectory(stop_reason)
    except TimeoutError:
        raise EpisodeFailed(
            StopReason.TIME_LIMIT, f"it took longer than `env.episode_timeout_s` = {allowance.episode_timeout_s} s"
        ) from None
    except EnvError as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, str(error)) from error
    except ReplayMismatch as error:
        raise EpisodeFailed(StopReason.REPLAY_MISMATCH, str(error)) from error
    except EngineDied:
        raise
    except EngineError as error:
        raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from error
