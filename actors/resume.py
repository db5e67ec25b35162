"""Going on where a preempted actor stopped: its record becomes a tape again, and a fresh environment is brought there.

What was sampled is not sampled again and not encoded again: tokens, log-probabilities and versions stay as recorded.
The environment has to be where it was, and not every one can be set there from a snapshot. So the recorded actions are
done again, and every answer must be what it was then, token for token and reward for reward, and every state_key too.
"""

from functools import partial

from actors.answer import answer, in_tokens, state_key
from actors.tape import Attempt, Tape
from common.action_format import ActionFormat
from common.chat import Chat
from common.trajectory import Trajectory
from envhub.env import Env


class ReplayMismatch(RuntimeError):
    """The environment is not where it was: what was sampled next would have answered something that was never said."""


def resumed_tape(attempt: Attempt, record: Trajectory) -> Tape:
    """The tape as it was when `record` was handed in; `attempt` goes on with it."""
    return Tape(
        attempt=attempt,
        tokens=record.token_array().tolist(),
        logprobs=record.behaviour_logprob_array().tolist(),
        loss_mask=record.loss_mask_array().tolist(),
        kept=[] if record.kept is None else [record.kept],
        branch_starts=list(record.branch_starts),
        version_spans=list(record.version_spans),
        turns=list(record.turns),
        prompt_stop=record.num_tokens,
        score=record.score,
        success=record.success,
        started_at_s=record.started_at_s,
        earlier_s=record.duration_s,
    )


async def replay(
    tape: Tape, *, opening: list[int], env: Env, chat: Chat, action_format: ActionFormat, step_timeout_s: float
) -> None:
    """Bring `env`, which was just reset, and `chat`, which opened with tokens `opening`, to where `tape` stands.

    Raises ReplayMismatch, and EnvError where the environment fails.
    """
    if opening != tape.tokens[: tape.turns[0].start]:
        raise ReplayMismatch("the task opens with other words than were recorded")
    prompt_stops = [*(turn.start for turn in tape.turns[1:]), tape.prompt_stop]
    for number, (turn, prompt_stop) in enumerate(zip(tape.turns, prompt_stops, strict=True)):
        if state_key(env) != turn.state_key:
            raise ReplayMismatch(f"turn {number} begins in another state than was recorded")
        action = action_format.parse(chat.reply(tape.tokens[turn.start : turn.stop]))
        observation = await answer(partial(env.step, action.text), timeout_s=step_timeout_s)
        if observation.done:
            raise ReplayMismatch(f"the episode ends with turn {number}, and went on when it was recorded")
        if observation.rewards != turn.rewards:
            raise ReplayMismatch(f"turn {number} earns {observation.rewards}, and {turn.rewards} when it was recorded")
        if (action.valid and observation.valid_action) != turn.valid_action:
            raise ReplayMismatch(f"the action of turn {number} was {_valid(turn.valid_action)} when it was recorded")
        extension = in_tokens(chat.extend, observation.messages)
        if extension.tokens != tape.tokens[turn.stop : prompt_stop]:
            raise ReplayMismatch(f"turn {number} is answered with other words than were recorded")
        if extension.new_branch != (turn.stop in tape.branch_starts):
            raise ReplayMismatch(f"turn {number} is followed by another branch than was recorded")


def _valid(is_valid: bool) -> str:
    return "valid" if is_valid else "invalid"
