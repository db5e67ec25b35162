"""Plays an episode whose environment runs the loop itself and requests generations; each request and answer is a turn.

Nothing is rendered here: the environment sends prompts as tokens. A prompt that continues the tokens so far extends the
sequence; any other prompt begins a branch. Sampled tokens that a branch repeats are not trained again: they are trained
where they were sampled.
"""

import time
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from actors.answer import answer
from actors.engine import Sampler
from actors.resume import ReplayMismatch
from actors.tape import Tape
from common.chat import Extension, end_tokens
from common.trajectory import Sampling, Trajectory
from envhub.adapters.verifiers_env import VerifiersEnv
from envhub.driving import Asked, Reply, Terms
from envhub.env import EnvError


def terms_of(tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, max_tokens: int, max_turns: int) -> Terms:
    """The terms of an episode for the environment. The tokenizer comes from the model folder of the engine."""
    return Terms(
        model_folder=Path(str(tokenizer.name_or_path)),
        max_tokens=max_tokens,
        max_turns=max_turns,
        sampling=sampling,
        end_tokens=end_tokens(tokenizer),
    )


async def drive(tape: Tape, *, env: VerifiersEnv, sampler: Sampler, terms: Terms, step_timeout_s: float) -> Trajectory:
    """Play one episode to its end, from the current end of `tape`.

    Raises EnvError, ReplayMismatch, and the errors of `sampler`.
    """
    attempt = tape.attempt
    asked = await answer(partial(env.begin, attempt.task, terms), timeout_s=step_timeout_s)
    if tape.turns:
        asked = await _replay(tape, asked, env=env, step_timeout_s=step_timeout_s)
    elif asked.stop_reason is None:
        tape.add_prompt(extension_of(tape.prompt(), asked.prompt))
    while asked.stop_reason is None:
        turn_started = time.perf_counter()
        try:
            completion = await sampler.generate(
                tape.prompt(), attempt.sampling, seed=attempt.turn_seed(len(tape.turns))
            )
        except ValueError as error:
            raise EnvError(f"it requested a generation from an invalid prompt: {error}") from error
        tape.add_completion(completion)
        generated = time.perf_counter()
        reply = Reply(tokens=completion.tokens, logprobs=completion.logprobs, finish_reason=completion.finish_reason)
        asked = await answer(partial(env.answer, reply), timeout_s=step_timeout_s)
        tape.add_turn(
            completion,
            asked,
            state_key="",
            valid_action=True,
            generate_s=generated - turn_started,
            env_s=time.perf_counter() - generated,
        )
        if asked.stop_reason is None:
            tape.add_prompt(extension_of(tape.prompt(), asked.prompt))
    if not tape.turns:
        raise EnvError("the episode ended before it requested any generation")
    return tape.trajectory(asked.stop_reason)


def extension_of(so_far: list[int], prompt: list[int]) -> Extension:
    """The tokens that `prompt` adds to the tokens so far, or the branch that it begins."""
    if prompt[: len(so_far)] == so_far:
        return Extension(tokens=prompt[len(so_far) :], new_branch=False)
    return Extension(tokens=prompt, new_branch=True)


async def _replay(tape: Tape, asked: Asked, *, env: VerifiersEnv, step_timeout_s: float) -> Asked:
    """Answer the requests with the recorded generations; return the request after them. Raises ReplayMismatch."""
    logprobs = tape.logprobs
    for number, turn in enumerate(tape.turns):
        branch = max(start for start in tape.branch_starts if start < turn.start)
        if asked.stop_reason is not None or asked.prompt != tape.tokens[branch : turn.start]:
            raise ReplayMismatch(f"the prompt of turn {number} differs from the recorded one")
        reply = Reply(
            tokens=tape.tokens[turn.start : turn.stop],
            logprobs=logprobs[turn.start : turn.stop],
            finish_reason=turn.finish_reason,
        )
        asked = await answer(partial(env.answer, reply), timeout_s=step_timeout_s)
        if asked.stop_reason is not None or asked.rewards != turn.rewards:
            raise ReplayMismatch(f"turn {number} differs from the record: its rewards, or the end of the episode")
    if asked.prompt != tape.prompt():
        raise ReplayMismatch("the prompt after the last turn differs from the recorded one")
    return asked
