"""Trajectories with words in them: what an environment says and a policy answers, as a tokenizer writes it."""

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Trajectory, Turn, VersionSpan, pack_logprobs, pack_mask, pack_tokens
from slipstream.common.text.chat import Chat
from tests.actors.episode.episodes import ids
from tests.replay.records.attempts import attempt_at, lease_of, ticket, turn

Exchange = tuple[str, tuple[Message, ...]]  # what the policy writes, and what it hears after it


def spoken(
    tokenizer: PreTrainedTokenizerBase,
    opening: tuple[Message, ...],
    *exchanges: Exchange | tuple[list[int], tuple[Message, ...]],
    group_id: int = 3,
    member: int = 1,
    attempt: int = 0,
    run_id: str = "run",
    reward: float = 1.0,
    actor: str = "actor-0",
    policy_version: int = 4,
) -> Trajectory:
    """The record of a conversation; `reward` comes with its last turn, and what is heard after that is left out."""
    chat = Chat(tokenizer)
    tokens, branch_starts = chat.open(opening), [0]
    turns: list[Turn] = []
    for index, (written, heard) in enumerate(exchanges):
        sampled = ids(tokenizer, written) if isinstance(written, str) else written
        start, last = len(tokens), index == len(exchanges) - 1
        tokens = tokens + sampled
        chat.reply(sampled)
        bare = turn(start, len(tokens), reward if last else 0.0, state=f"state {index}")
        turns.append(msgspec.structs.replace(bare, generate_s=0.25, env_s=0.125))
        if not last:
            extension = chat.extend(heard)
            if extension.new_branch:
                branch_starts.append(len(tokens))
            tokens = tokens + extension.tokens
    sampled_spans = [range(each.start, each.stop) for each in turns]
    mask = [any(place in span for span in sampled_spans) for place in range(len(tokens))]
    return msgspec.structs.replace(
        attempt_at(lease_of(ticket(group_id, num_members=member + 1)), member, run_id=run_id, actor=actor),
        attempt=attempt,
        turns=turns,
        tokens=pack_tokens(tokens),
        behaviour_logprobs=pack_logprobs([-0.5 if sampled else 0.0 for sampled in mask]),
        loss_mask=pack_mask(mask),
        branch_starts=branch_starts,
        version_spans=[VersionSpan(start=each.start, stop=each.stop, policy_version=policy_version) for each in turns],
        score=min(1.0, max(0.0, reward)),
        success=reward > 0.5,
        duration_s=0.5,
    )
