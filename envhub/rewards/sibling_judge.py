"""A judge that compares the sibling attempts at one task, and marks them relative to each other.

One request shows all attempts and asks for a mark of each, as RULER of ART does
(https://art.openpipe.ai/fundamentals/ruler).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.trajectory import Trajectory
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode, Reading
from slipstream.envhub.rewards.judge import Judge, columns_of, cut_in_the_middle


class Shown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a judge sees of one attempt. The actor that played it stores this with the trajectory."""

    conversation: list[dict[str, str]]
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """The conversation in JSON."""
        return json.dumps(self.conversation, ensure_ascii=False)


def show(episode: Episode, columns: Sequence[str]) -> str:
    """Return what judges see of `episode`, for `Trajectory.shown`. Raises EnvError if it has no such column."""
    shown = {"conversation": [*episode.messages, *episode.ending], "columns": columns_of(episode, columns)}
    return json.dumps(shown, ensure_ascii=False, default=str)


def read_shown(trajectory: Trajectory) -> Shown:
    """Return what judges see of a stored attempt. Raises EnvError if its actor stored nothing that can be read."""
    try:
        return msgspec.json.decode(trajectory.shown, type=Shown)
    except MALFORMED as error:
        raise EnvError(f"member {trajectory.member}, of actor {trajectory.actor}, cannot be judged: {error}") from None


async def sibling_marks(judge: Judge, members: Sequence[Shown]) -> list[Reading[float]]:
    """Return a mark in [0, 1] for each member of a group. Equal conversations get equal marks.

    Raises EnvError if the judge gives no marks within the deadline.
    """
    # The order of hashes: each place is as likely for the best as for the worst, and a repeated judging asks the same.
    texts = sorted({member.text for member in members}, key=lambda text: hashlib.blake2b(text.encode()).digest())
    conversations = {member.text: member.conversation for member in members}
    if missing := sorted(set(judge.columns) - members[0].columns.keys()):
        raise EnvError(f"the actor stored no column {', '.join(missing)}, which the judge is shown")
    reference = {name: members[0].columns[name] for name in judge.columns}
    listed = await judge.ask(
        judge.rubric.instructions_for_list(len(texts)),
        _text([conversations[text] for text in texts], reference, judge.max_chars),
        read=lambda answer: judge.rubric.read_list(answer, len(texts)),
    )
    marks = dict(zip(texts, listed.value, strict=True))
    return [Reading(value=marks[member.text], policy_version=listed.policy_version) for member in members]


def _text(conversations: list[list[dict[str, str]]], reference: Mapping[str, Any], max_chars: int) -> str:
    """The request's JSON: what all conversations begin with, once, and then each by its number."""
    num_shared = _num_shared(conversations) if len(conversations) > 1 else 0
    each_chars = max_chars // (len(conversations) + 1)
    episodes = {
        str(number): _within(conversation[num_shared:], each_chars)
        for number, conversation in enumerate(conversations, start=1)
    }
    shared = {"shared_beginning": _within(conversations[0][:num_shared], each_chars)} if num_shared else {}
    known = {"reference": reference} if reference else {}
    return json.dumps({**shared, **known, "episodes": episodes}, ensure_ascii=False, default=str)


def _num_shared(conversations: Sequence[Sequence[dict[str, str]]]) -> int:
    places = zip(*conversations, strict=False)
    return sum(1 for _ in takewhile(lambda messages: all(each == messages[0] for each in messages), places))


def _within(conversation: Sequence[dict[str, str]], max_chars: int) -> Any:
    """The conversation; as a text without its middle if it is longer than `max_chars`."""
    text = json.dumps(conversation, ensure_ascii=False)
    return conversation if len(text) <= max_chars else cut_in_the_middle(text, max_chars)
