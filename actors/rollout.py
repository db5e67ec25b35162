"""One episode, from `reset` to its record. Tokens in, tokens out; facts only, the learner judges them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.engine import EngineError, Sampler
from actors.tape import Attempt, Tape
from common.action_format import ActionFormat
from common.chat import Chat, Extension
from common.message import Message
from common.trajectory import MAX_REWARD, OUTCOME_OF, StopReason, Trajectory
from envhub.catalogue import make_env
from envhub.env import Env, EnvError, Observation

log = logging.getLogger(__name__)


class EpisodeFailed(RuntimeError):
    """The episode ended by no doing of the policy. It has a reason and no reward, and is redone."""

    def __init__(self, stop_reason: StopReason, why: str) -> None:
        super().__init__(why)
        self.stop_reason = stop_reason
        self.outcome = OUTCOME_OF[stop_reason]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """How long an episode may go on."""

    max_turns: int
    max_tokens: int
    step_timeout_s: float
    episode_timeout_s: float


@contextlib.asynccontextmanager
async def fresh_env(name: str, options: Mapping[str, Any], *, timeout_s: float) -> AsyncIterator[Env]:
    """An environment for one episode, closed behind it. Raises EpisodeFailed where it cannot be made."""
    try:
        env = make_env(name, options)
    except Exception as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, f"cannot be made: {type(error).__name__}: {error}") from error
    try:
        yield env
    finally:
        try:
            async with asyncio.timeout(timeout_s):
                await env.close()
        except Exception as error:  # the episode is whole all the same
            log.warning("%s does not close: %s: %s", name, type(error).__name__, error)


async def rollout(
    attempt: Attempt,
    *,
    env: Env,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    action_format: ActionFormat,
    allowance: Allowance,
) -> Trajectory:
    """Play one episode. Raises EpisodeFailed where the end was not the policy's own doing."""
    try:
        async with asyncio.timeout(allowance.episode_timeout_s):
            return await _play(attempt, env, sampler, Chat(tokenizer), action_format, allowance)
    except TimeoutError:
        raise EpisodeFailed(StopReason.TIME_LIMIT, f"longer than {allowance.episode_timeout_s} s") from None
    except EnvError as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, str(error)) from error
    except EngineError as error:
        raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from error


async def _play(
    attempt: Attempt, env: Env, sampler: Sampler, chat: Chat, action_format: ActionFormat, allowance: Allowance
) -> Trajectory:
    tape = Tape()
    observation = await _answer(partial(env.reset, attempt.task), allowance.step_timeout_s)
    if observation.done or not observation.messages:
        raise EnvError("a reset came back with the episode over, or with nothing said")
    opening = with_instructions(observation.messages, action_format)
    tape.add_prompt(Extension(tokens=chat.open(opening), new_branch=False))
    stop_reason = _spent(tape, allowance)
    while stop_reason is None:
        turn_started = time.perf_counter()
        completion = await sampler.generate(
            tape.prompt(), attempt.sampling, seed=attempt.turn_seed(len(tape.turns))
        )  # fmt: skip
        tape.add_completion(completion)
        action = action_format.parse(chat.reply(completion.tokens))
        generated = time.perf_counter()
        observation = await _answer(partial(env.step, action.text), allowance.step_timeout_s)
        if not observation.rewards:
            raise EnvError("a step came back without rewards; where nothing was earned, say 0")
        tape.add_turn(
            completion,
            observation,
            valid_action=action.valid,
            generate_s=generated - turn_started,
            env_s=time.perf_counter() - generated,
        )
        if observation.done:
            stop_reason = StopReason.DONE
        else:
            tape.add_prompt(chat.extend(observation.messages))
            stop_reason = _spent(tape, allowance)
    if not tape.turns:
        raise EnvError(f"its first prompt of {len(tape.tokens)} tokens leaves no room in {allowance.max_tokens}")
    return tape.trajectory(attempt, last=observation, stop_reason=stop_reason)


def with_instructions(messages: tuple[Message, ...], action_format: ActionFormat) -> tuple[Message, ...]:
    """The first messages, with what the parser will demand said in a system message."""
    if not action_format.instructions:
        return messages
    if messages[0].role == "system":
        told = Message(role="system", content=f"{messages[0].content}\n{action_format.instructions}")
        return (told, *messages[1:])
    return (Message(role="system", content=action_format.instructions), *messages)


async def _answer(ask: Callable[[], Awaitable[Observation]], timeout_s: float) -> Observation:
    """What the environment answers. This is the rollout boundary: whatever else it does becomes an EnvError."""
    try:
        async with asyncio.timeout(timeout_s):
            observation = await ask()
        _check_answer(observation)
    except EnvError:
        raise
    except TimeoutError:
        raise EnvError(f"no answer within {timeout_s} s") from None
    except Exception as error:
        raise EnvError(f"{type(error).__name__}: {error}") from error
    return observation


def _check_answer(observation: object) -> None:
    """Raise EnvError for what is no observation: it would do harm far from its cause."""
    if not isinstance(observation, Observation):
        raise EnvError(f"answered a {type(observation).__name__}, not an Observation")
    for message in observation.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(f"said {message!r}, not a Message")
    for name, reward in observation.rewards.items():
        if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
            raise EnvError(f"gave {reward!r} as reward {name!r}, not a finite number")
    if not 0.0 <= observation.score <= 1.0:
        raise EnvError(f"gave a score of {observation.score!r}, not in [0, 1]")


def _spent(tape: Tape, allowance: Allowance) -> StopReason | None:
    """The allowance that leaves no room for another turn."""
    if len(tape.turns) >= allowance.max_turns:
        return StopReason.MAX_TURNS
    if len(tape.tokens) - tape.branch_starts[-1] >= allowance.max_tokens:
        return StopReason.MAX_TOKENS
    return None
