"""Continues an episode from its record, of a preempted actor or of a sibling, in a fresh environment.

Nothing is sampled or encoded again: tokens, log-probabilities and versions stay as recorded. The environment must get
into the same state again, and not every environment can restore a snapshot. So the recorded actions are replayed, and
every answer must equal the recorded one: its tokens, its rewards and the state_key.
"""

from functools import partial

import msgspec

from slipstream.actors.episode.actions import Actions
from slipstream.actors.episode.answer import answer, in_tokens, state_key
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord, Exchange
from slipstream.common.records.kept_sets import no_sets
from slipstream.common.records.trajectory import Fork, Trajectory
from slipstream.common.text.chat import Chat, Extension
from slipstream.envhub.env import Env


class ReplayMismatch(RuntimeError):
    """The environment behaves differently from the record, so the recorded tokens cannot be continued."""


def resumed_record(attempt: Attempt, partial: Trajectory) -> EpisodeRecord:
    """The record as it was when `partial` was handed in; `attempt` continues it."""
    return EpisodeRecord(
        attempt=attempt,
        tokens=partial.token_array().tolist(),
        logprobs=partial.behaviour_logprob_array().tolist(),
        loss_mask=partial.loss_mask_array().tolist(),
        kept=[partial.kept or no_sets(int(partial.loss_mask_array().sum()))],
        branch_starts=list(partial.branch_starts),
        version_spans=list(partial.version_spans),
        turns=list(partial.turns),
        fork=partial.fork,
        prompt_stop=partial.num_tokens,
        score=partial.score,
        success=partial.success,
        started_at_s=partial.started_at_s,
        earlier_s=partial.duration_s,
    )


def forked_record(attempt: Attempt, parent: Trajectory, fork: Fork) -> EpisodeRecord:
    """The record of an attempt that begins with the first turns of a finished sibling, `parent`.

    Rewards are left open until they are replayed: parts of `env.rewards` may have changed those of the parent.
    """
    stop = parent.turns[fork.num_turns].start
    num_sampled = int(parent.loss_mask_array()[:stop].sum())
    return EpisodeRecord(
        attempt=attempt,
        tokens=parent.token_array()[:stop].tolist(),
        logprobs=parent.behaviour_logprob_array()[:stop].tolist(),
        loss_mask=parent.loss_mask_array()[:stop].tolist(),
        kept=[parent.kept.between(0, num_sampled) if parent.kept else no_sets(num_sampled)],
        branch_starts=[start for start in parent.branch_starts if start < stop],
        version_spans=[span for span in parent.version_spans if span.stop <= stop],
        turns=[msgspec.structs.replace(turn, rewards={}) for turn in parent.turns[: fork.num_turns]],
        fork=fork,
        prompt_stop=stop,
        started_at_s=parent.started_at_s,  # a prompt may show the date
    )


async def replay(
    record: EpisodeRecord, *, opening: list[int], env: Env, chat: Chat, actions: Actions, step_timeout_s: float
) -> None:
    """Replay the turns of `record` in `env`, which was just reset, and in `chat`, which opened with tokens `opening`.

    Raises ReplayMismatch, and EnvError if the environment fails.
    """
    if opening != record.tokens[: record.turns[0].start]:
        raise ReplayMismatch("the first messages differ from those recorded")
    prompt_stops = [*(turn.start for turn in record.turns[1:]), record.prompt_stop]
    for number, (turn, prompt_stop) in enumerate(zip(record.turns, prompt_stops, strict=True)):
        tokens = record.tokens[turn.start : turn.stop]
        if chat.is_summarising:
            summary = chat.reply(tokens)
            if not turn.rewards:
                nothing = dict.fromkeys(record.turns[number - 1].rewards, 0.0)
                record.turns[number] = msgspec.structs.replace(turn, rewards=nothing)
            record.exchanges.append(Exchange(reply=summary, action=summary, answer=()))
            _check_prompt(record, in_tokens(chat.extend, ()), number=number, prompt_stop=prompt_stop)
            continue
        if state_key(env) != turn.state_key:
            raise ReplayMismatch(f"the state before turn {number} differs from the recorded one")
        reply = chat.reply(tokens)
        branch = max(start for start in record.branch_starts if start < turn.start)
        prompt, possible = record.tokens[branch : turn.start], await actions.possible(env)
        action = await actions.read(chat, reply, tokens=tokens, prompt=prompt, possible=possible)
        observation = await answer(partial(env.step, action.text), timeout_s=step_timeout_s)
        shown = await actions.shown(action, observation)
        record.exchanges.append(Exchange(reply=reply, action=action.text, answer=shown))
        if observation.done:
            raise ReplayMismatch(f"the episode ends with turn {number}, and the recorded one continued")
        if not turn.rewards:
            rewards = {name: float(reward) for name, reward in observation.rewards.items()}
            record.turns[number] = msgspec.structs.replace(turn, rewards=rewards)
        elif observation.rewards != turn.rewards:
            raise ReplayMismatch(f"the rewards of turn {number} are {observation.rewards}, recorded {turn.rewards}")
        if (action.valid and observation.valid_action) != turn.valid_action:
            raise ReplayMismatch(f"the action of turn {number} was recorded as {_valid(turn.valid_action)}")
        record.score, record.success = float(observation.score), bool(observation.success)
        _check_prompt(record, in_tokens(chat.extend, shown), number=number, prompt_stop=prompt_stop)


def _check_prompt(record: EpisodeRecord, extension: Extension, *, number: int, prompt_stop: int) -> None:
    """Raise ReplayMismatch unless `extension` is the recorded prompt after turn `number`."""
    stop = record.turns[number].stop
    if extension.tokens != record.tokens[stop:prompt_stop]:
        raise ReplayMismatch(f"the answer to turn {number} differs from the recorded one")
    if extension.new_branch != (stop in record.branch_starts):
        raise ReplayMismatch(f"the prompt after turn {number} begins a branch, or does not, unlike the recorded one")


def _valid(is_valid: bool) -> str:
    return "valid" if is_valid else "invalid"
