"""An episode that its environment plays by itself, asking for tokens: a turn is what was asked, and the answer to it.

Nothing is rendered here. A prompt that goes on where the last answer ended lengthens the sequence; every other begins a
branch. What the environment repeats of sampled tokens in a branch is read and not trained: they are trained where they
were sampled.
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
from envhub.driving import Asked, Reply, Terms
from envhub.env import EnvError
from envhub.adapters.verifiers_env import VerifiersEnv


def terms_of(
    tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, max_tokens: int, max_turns: int
) -> Terms:  # fmt: skip
    """What an episode is played with. The tokenizer is of the folder that the engine has its model from."""
    return Terms(
        model_folder=Path(str(tokenizer.name_or_path)),
        max_tokens=max_tokens,
        max_turns=max_turns,
        sampling=sampling,
        end_tokens=end_tokens(tokenizer),
    )


async def drive(
    tape: Tape, *, env: VerifiersEnv, sampler: Sampler, terms: Terms, step_timeout_s: float
) -> Trajectory:  # fmt: skip
    """Play one episode on `tape`, from where that stands to the end.

    Raises EnvError, ReplayMismatch, and what `sampler` does.
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
            )  # fmt: skip
        except ValueError as error:
            raise EnvError(f"it asked about tokens that are none of the model's: {error}") from error
        tape.add_completion(completion)
        generated = time.perf_counter()
        reply = Reply(
            tokens=completion.tokens, logprobs=completion.logprobs, finish_reason=completion.finish_reason
        )  # fmt: skip
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
        raise EnvError("the episode was over before anything was asked")
    return tape.trajectory(asked.stop_reason)


def extension_of(standing: list[int], prompt: list[int]) -> Extension:
    """What `prompt` adds to the tokens that stand, or the branch that it begins."""
    if prompt[: len(standing)] == standing:
        return Extension(tokens=prompt[len(standing) :], new_branch=False)
    return Extension(tokens=prompt, new_branch=True)


async def _replay(tape: Tape, asked: Asked, *, env: VerifiersEnv, step_timeout_s: float) -> Asked:
    """Answer what is asked with what was sampled before; return what is asked behind it. Raises ReplayMismatch."""
    logprobs = tape.logprobs
    for number, turn in enumerate(tape.turns):
        branch = max(start for start in tape.branch_starts if start < turn.start)
        if asked.stop_reason is not None or asked.prompt != tape.tokens[branch : turn.start]:
            raise ReplayMismatch(f"turn {number} begins with another prompt than was recorded")
        reply = Reply(
            tokens=tape.tokens[turn.start : turn.stop],
            logprobs=logprobs[turn.start : turn.stop],
            finish_reason=turn.finish_reason,
        )
        asked = await answer(partial(env.answer, reply), timeout_s=step_timeout_s)
        if asked.stop_reason is not None or asked.rewards != turn.rewards:
            raise ReplayMismatch(f"turn {number} ends in another way than was recorded")
    if asked.prompt != tape.prompt():
        raise ReplayMismatch("the prompt behind the last turn is another than was recorded")
    return asked
