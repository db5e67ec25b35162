"""One episode, from `reset` to its record. Tokens in, tokens out; facts only, the learner judges them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from actors.answer import answer, boundary, in_tokens, state_key
from actors.drive import drive, terms_of
from actors.engine import EngineDied, EngineError, Sampler
from actors.resume import ReplayMismatch, replay
from actors.tape import Tape
from common.action_format import ActionFormat
from common.chat import Chat, Extension
from common.env_config import PartConfig
from common.message import Message
from common.trajectory import OUTCOME_OF, StopReason, Task, Trajectory
from envhub.catalogue import make_any_env
from envhub.env import Env, EnvError
from envhub.adapters.verifiers_env import VerifiersEnv

HASTY_CLOSE_S = 2.0

log = logging.getLogger(__name__)


class EpisodeFailed(RuntimeError):
    """The episode ended by no doing of the policy. It has a reason and no reward, and is redone."""

    def __init__(self, stop_reason: StopReason, why: str) -> None:
        super().__init__(why.encode(errors="backslashreplace").decode())  # half a surrogate pair reaches no Redis
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
async def fresh_env(
    envs: Mapping[str, PartConfig], task: Task, *, timeout_s: float
) -> AsyncIterator[Env | VerifiersEnv]:
    """The environment of `task`, for one episode, closed behind it. Raises EpisodeFailed where it cannot be made."""
    if (part := envs.get(task.env)) is None:
        known = ", ".join(envs)
        raise EpisodeFailed(StopReason.ENV_ERROR, f"the run has no environment {task.env!r}, only {known}")
    try:
        with boundary():
            env = make_any_env(part.name, part.options)
    except EnvError as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, f"cannot be made: {error}") from error
    try:
        yield env
    except asyncio.CancelledError:
        timeout_s = min(timeout_s, HASTY_CLOSE_S)  # the group is given back behind this, and perhaps the host goes
        raise
    finally:
        try:
            with boundary():
                async with asyncio.timeout(timeout_s):
                    await env.close()
        except EnvError as error:  # the episode is whole all the same
            log.warning("%s does not close: %s", task.env, error)


async def rollout(
    tape: Tape,
    *,
    env: Env | VerifiersEnv,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    action_format: ActionFormat,
    allowance: Allowance,
) -> Trajectory:
    """Play one episode on `tape`, from where that stands to the end.

    Raises EpisodeFailed where the end was not the policy's own doing, EngineDied where no other episode could go on
    either. When this is cancelled, the tape holds what there is so far.
    """
    try:
        async with asyncio.timeout(allowance.episode_timeout_s):
            if isinstance(env, VerifiersEnv):
                terms = terms_of(
                    tokenizer, tape.attempt.sampling, max_tokens=allowance.max_tokens, max_turns=allowance.max_turns
                )
                return await drive(tape, env=env, sampler=sampler, terms=terms, step_timeout_s=allowance.step_timeout_s)
            return await _play(tape, env, sampler, Chat(tokenizer), action_format, allowance)
    except TimeoutError:
        raise EpisodeFailed(StopReason.TIME_LIMIT, f"longer than {allowance.episode_timeout_s} s") from None
    except EnvError as error:
        raise EpisodeFailed(StopReason.ENV_ERROR, str(error)) from error
    except ReplayMismatch as error:
        raise EpisodeFailed(StopReason.REPLAY_MISMATCH, str(error)) from error
    except EngineDied:
        raise
    except EngineError as error:
        raise EpisodeFailed(StopReason.INFRA_ERROR, str(error)) from error


async def _play(
    tape: Tape, env: Env, sampler: Sampler, chat: Chat, action_format: ActionFormat, allowance: Allowance
) -> Trajectory:
    attempt, step_timeout_s = tape.attempt, allowance.step_timeout_s
    observation = await answer(partial(env.reset, attempt.task), timeout_s=step_timeout_s)
    if observation.done or not observation.messages:
        raise EnvError("a reset came back with the episode over, or with nothing said")
    opening = in_tokens(chat.open, with_instructions(observation.messages, action_format))
    if tape.turns:
        await replay(
            tape, opening=opening, env=env, chat=chat, action_format=action_format, step_timeout_s=step_timeout_s
        )
    else:
        tape.add_prompt(Extension(tokens=opening, new_branch=False))
    stop_reason = spent(tape, allowance)
    while stop_reason is None:
        chosen_in = state_key(env)
        turn_started = time.perf_counter()
        completion = await sampler.generate(
            tape.prompt(), attempt.sampling, seed=attempt.turn_seed(len(tape.turns))
        )  # fmt: skip
        tape.add_completion(completion)
        action = action_format.parse(chat.reply(completion.tokens))
        generated = time.perf_counter()
        observation = await answer(partial(env.step, action.text), timeout_s=step_timeout_s)
        if not observation.rewards:
            raise EnvError("a step came back without rewards; where nothing was earned, say 0")
        tape.add_turn(
            completion,
            observation,
            state_key=chosen_in,
            valid_action=action.valid,
            generate_s=generated - turn_started,
            env_s=time.perf_counter() - generated,
        )
        if observation.done:
            stop_reason = StopReason.DONE
        else:
            tape.add_prompt(in_tokens(chat.extend, observation.messages))
            stop_reason = spent(tape, allowance)
    if not tape.turns:
        raise EnvError(f"its first prompt of {len(tape.tokens)} tokens leaves no room in {allowance.max_tokens}")
    return tape.trajectory(stop_reason)


def with_instructions(messages: tuple[Message, ...], action_format: ActionFormat) -> tuple[Message, ...]:
    """The first messages, with what the parser will demand said in a system message."""
    if not action_format.instructions:
        return messages
    if messages[0].role == "system":
        told = Message(role="system", content=f"{messages[0].content}\n{action_format.instructions}")
        return (told, *messages[1:])
    return (Message(role="system", content=action_format.instructions), *messages)


def spent(tape: Tape, allowance: Allowance) -> StopReason | None:
    """The allowance that leaves no room for another turn."""
    if len(tape.turns) >= allowance.max_turns:
        return StopReason.MAX_TURNS
    if len(tape.tokens) - tape.branch_starts[-1] >= allowance.max_tokens:
        return StopReason.MAX_TOKENS
    return None
