"""Plays one episode, from `reset` to its record. It records facts only; the learner computes advantages from them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, EngineDied, EngineError, Sampler
from slipstream.actors.episode.actions import Actions
from slipstream.actors.episode.answer import Boundary, answer, in_tokens, state_key
from slipstream.actors.episode.drive import drive, terms_of
from slipstream.actors.episode.enforced import Enforcer
from slipstream.actors.episode.episode_record import EpisodeRecord, Exchange
from slipstream.actors.episode.resume import ReplayMismatch, replay
from slipstream.actors.episode.thought_limit import ThoughtLimit
from slipstream.common.config.config import Config
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import OUTCOME_OF, StopReason, Task, Trajectory
from slipstream.common.text.action_format import ActionFormat
from slipstream.common.text.chat import Chat, ChatRules, Extension
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.driving import DrivingEnv, Parse
from slipstream.envhub.env import Env, EnvError, Observation
from slipstream.envhub.isolation.offspring import begin_episode, end_offspring

HASTY_CLOSE_S = 2.0
MAX_WHY_CHARS = 4000

log = logging.getLogger(__name__)


class EpisodeFailed(RuntimeError):
    """The episode ended for a reason other than the policy. It has no reward, and is redone."""

    def __init__(self, stop_reason: StopReason, why: str) -> None:
        # Without half surrogate pairs, which cannot be sent to Redis.
        super().__init__(why[:MAX_WHY_CHARS].encode(errors="backslashreplace").decode())
        self.stop_reason = stop_reason
        self.outcome = OUTCOME_OF[stop_reason]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """The limits of an episode, and the rules of its prompts."""

    max_turns: int
    max_tokens: int
    step_timeout_s: float
    episode_timeout_s: float
    max_invalid_turns: int = 0  # in a row, after which the episode ends; 0: no limit
    rules: ChatRules = field(default_factory=ChatRules)
    shows_admissible: bool = False  # whether each prompt lists the admissible actions
    enforces_admissible: bool = False  # whether actions are sampled among them
    max_thought_tokens: int = 0  # after which a thought is closed; 0: no limit of its own
    rank: str = ""  # with enforced actions: take the likeliest instead, by its log-probability's "total" or "mean"

    @classmethod
    def of(cls, config: Config) -> "Allowance":
        return cls(
            max_turns=config.env.max_turns,
            max_tokens=config.model.max_tokens,
            step_timeout_s=config.env.step_timeout_s,
            episode_timeout_s=config.env.episode_timeout_s,
            max_invalid_turns=config.env.max_invalid_turns,
            rules=ChatRules.of(config.model),
            shows_admissible=config.env.show_admissible,
            enforces_admissible=config.env.enforce_admissible,
            max_thought_tokens=config.sampling.max_thought_tokens,
        )


@contextlib.asynccontextmanager
async def fresh_env(
    envs: Mapping[str, MixtureEntry], task: Task, *, timeout_s: float
) -> AsyncIterator[Env | DrivingEnv]:
    """The environment of `task` for one episode. Afterwards it is closed, and the processes that it started are killed.

    Raises EpisodeFailed if it cannot be made.
    """
    if (part := envs.get(task.env)) is None:
        known = ", ".join(envs)
        raise EpisodeFailed(StopReason.ENV_ERROR, f"the run has no environment {task.env!r}, only {known}")
    mark = begin_episode()
    try:
        try:
            with Boundary():
                env = make_any_env(part.name, part.options)
        except EnvError as error:
            raise EpisodeFailed(StopReason.ENV_ERROR, f"the environment cannot be made: {error}") from error
        async with _closing(env, task.env, timeout_s=timeout_s):
            yield env
    finally:
        num_left = await asyncio.shield(asyncio.to_thread(end_offspring, mark))
        if num_left:
            log.info("killed %d processes that environment %s had left running", num_left, task.env)


@contextlib.asynccontextmanager
async def _closing(env: Env | DrivingEnv, name: str, *, timeout_s: float) -> AsyncIterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        timeout_s = min(timeout_s, HASTY_CLOSE_S)  # the group is given back after this, and the host may go soon
        raise
    finally:
        try:
            with Boundary():
                async with asyncio.timeout(timeout_s):
                    await env.close()
        except EnvError as error:  # the episode is complete anyway
            log.warning("environment %s failed to close: %s", name, error)


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
        sampler = ThoughtLimit(
            sampler, tokenizer, max_thought_tokens=allowance.max_thought_tokens, max_tokens=allowance.max_tokens
        )
    try:
        async with asyncio.timeout(allowance.episode_timeout_s):
            if isinstance(env, DrivingEnv):
                terms = terms_of(
                    tokenizer,
                    record.attempt.sampling,
                    max_tokens=allowance.max_tokens,
                    max_turns=allowance.max_turns,
                    started_at_s=record.started_at_s,
                    parse=parse,
                )
                return await drive(
                    record, env=env, sampler=sampler, terms=terms, step_timeout_s=allowance.step_timeout_s
                )
            chat = Chat(tokenizer, rules=allowance.rules, started_at_s=record.started_at_s)
            return await _play(record, env, sampler, chat, action_format, allowance, parse)
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


async def _play(
    record: EpisodeRecord,
    env: Env,
    sampler: Sampler,
    chat: Chat,
    action_format: ActionFormat,
    allowance: Allowance,
    parse: Parse | None,
) -> Trajectory:
    step_timeout_s = allowance.step_timeout_s
    observation = await _first_observation(env, record.attempt.task, timeout_s=step_timeout_s)
    actions = Actions.of(
        observation,
        action_format,
        parse=parse,
        lists=env if allowance.shows_admissible else None,
        enforces=allowance.enforces_admissible,
    )
    generator = _generator(sampler, chat, action_format, allowance)
    record.opening = with_instructions(await actions.listed(tuple(observation.messages)), action_format)
    record.exchanges, record.columns = [], observation.columns
    opening = in_tokens(partial(chat.open, tools=actions.tools), record.opening)
    if record.turns:
        await replay(record, opening=opening, env=env, chat=chat, actions=actions, step_timeout_s=step_timeout_s)
    else:
        record.add_prompt(Extension(tokens=opening, new_branch=False))
    stop_reason = spent(record, allowance)
    while stop_reason is None:
        if chat.is_summarising:
            await _summarise(record, sampler, chat)
            stop_reason = spent(record, allowance)
            continue
        chosen_in = state_key(env)
        turn_started = time.perf_counter()
        prompt, possible = record.prompt(), await actions.possible(env)
        completion = await _sampled(record, generator, chat, possible)
        record.add_completion(completion)
        reply = chat.reply(completion.tokens)
        action = await actions.read(chat, reply, tokens=completion.tokens, prompt=prompt, possible=possible)
        generated = time.perf_counter()
        observation = await answer(partial(env.step, action.text), timeout_s=step_timeout_s)
        if not observation.rewards:
            raise EnvError("step returned no rewards; return a reward of 0 if nothing was earned")
        record.add_turn(
            completion,
            observation,
            state_key=chosen_in,
            valid_action=action.valid,
            generate_s=generated - turn_started,
            env_s=time.perf_counter() - generated,
        )
        shown = await actions.shown(action, observation)
        record.exchanges.append(Exchange(reply=reply, action=action.text, answer=shown))
        if observation.done:
            stop_reason = StopReason.DONE
        else:
            record.add_prompt(in_tokens(chat.extend, shown))
            stop_reason = spent(record, allowance)
    return _whole(record, stop_reason, max_tokens=allowance.max_tokens)


async def _first_observation(env: Env, task: Task, *, timeout_s: float) -> Observation:
    """What the environment shows first. Raises EnvError if there is nothing to do."""
    observation = await answer(partial(env.reset, task), timeout_s=timeout_s)
    if observation.done or not observation.messages:
        raise EnvError("reset returned an observation that is done or has no messages")
    return observation


def _whole(record: EpisodeRecord, stop_reason: StopReason, *, max_tokens: int) -> Trajectory:
    """The episode on `record`. Raises EnvError if it has no turn."""
    if not record.turns:
        raise EnvError(
            f"its first prompt of {len(record.tokens)} tokens leaves no room in `model.max_tokens` = {max_tokens}"
        )
    return record.trajectory(stop_reason)


def _generator(sampler: Sampler, chat: Chat, action_format: ActionFormat, allowance: Allowance) -> Sampler | Enforcer:
    """What generates turns with an action. Raises EnvError for a format without marks, if actions are enforced."""
    if not allowance.enforces_admissible:
        return sampler
    return Enforcer(sampler, chat.tokenizer, action_format, max_tokens=allowance.max_tokens, rank=allowance.rank)


async def _sampled(record: EpisodeRecord, sampler: Sampler | Enforcer, chat: Chat, possible: list[str]) -> Completion:
    """What the policy writes in the next turn."""
    attempt, prompt, turn = record.attempt, record.prompt(), len(record.turns)
    if isinstance(sampler, Enforcer):
        return await sampler.generate(prompt, attempt=attempt, turn=turn, actions=possible, chat=chat)
    return await sampler.generate(prompt, attempt.sampling, seed=attempt.turn_seed(turn))


async def _summarise(record: EpisodeRecord, sampler: Sampler, chat: Chat) -> None:
    """Have the policy summarise the episode so far: a turn without an action, trained like the others."""
    attempt, started = record.attempt, time.perf_counter()
    completion = await sampler.generate(record.prompt(), attempt.sampling, seed=attempt.turn_seed(len(record.turns)))
    record.add_completion(completion)
    summary = chat.reply(completion.tokens)
    record.add_summary(completion, generate_s=time.perf_counter() - started)
    record.exchanges.append(Exchange(reply=summary, action=summary, answer=()))
    record.add_prompt(in_tokens(chat.extend, ()))


def with_instructions(messages: tuple[Message, ...], action_format: ActionFormat) -> tuple[Message, ...]:
    """The first messages with the instructions of the action format in the system message."""
    if not action_format.instructions:
        return messages
    if messages[0].role == "system":
        extended = Message(role="system", content=f"{messages[0].content}\n{action_format.instructions}")
        return (extended, *messages[1:])
    return (Message(role="system", content=action_format.instructions), *messages)


def spent(record: EpisodeRecord, allowance: Allowance) -> StopReason | None:
    """The limit that allows no further turn; None if there is room."""
    if len(record.turns) >= allowance.max_turns:
        return StopReason.MAX_TURNS
    if len(record.tokens) - record.branch_starts[-1] >= allowance.max_tokens:
        return StopReason.MAX_TOKENS
    most = allowance.max_invalid_turns
    if 0 < most <= len(record.turns) and not any(turn.valid_action for turn in record.turns[-most:]):
        return StopReason.MAX_INVALID_TURNS
    return None
