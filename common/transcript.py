"""What was said, from the tokens of a trajectory: shown to give those very tokens, or not claimed at all.

A trajectory holds tokens, not messages. So the chat template is run backwards: rendering a few probes shows what it
writes around a message of each role, prompts are cut at these marks, and the messages found are played through `Chat`
once more. They are the messages only if that gives every recorded prompt, token for token. What nobody can tell from
tokens: a text that itself held the marks of a template is read as the messages that the policy took it for.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from common.chat import Chat, Extension, end_tokens
from common.message import Message
from common.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

A, B, PROBE = "first words", "second words", "probe words"  # of which no template makes anything else


class Fidelity(enum.Enum):
    """What the messages of a transcript give when they are rendered and encoded."""

    TOKENS = "tokens"
    """The recorded tokens, from the first to the last."""
    PROMPTS = "prompts"
    """Every prompt as it was; a sampled text would be encoded otherwise, or the template rewrote what stood."""
    NONE = "none"
    """The messages could not be told from the tokens: there are only texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnText:
    """One turn as the tokenizer decodes it, special tokens included."""

    prompt: str  # what was new before the generation; with `new_branch`, all of it
    action: str
    new_branch: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """What was said in one episode. `messages` is empty where `fidelity` is NONE."""

    messages: list[Message]
    fidelity: Fidelity
    turns: list[TurnText]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """The tokens before one generation, and those of the generation."""

    tokens: list[int]
    sampled: list[int]
    new_branch: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """What a template writes before and after the words of a role."""

    role: str
    opening: str
    closing: str


class Transcriber:
    """Reads trajectories with the tokenizer that they were made with. Its template is probed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._unsaid = end_tokens(tokenizer).union(tokenizer.all_special_ids)  # as `Chat` has it
        marks = _marks(tokenizer)
        self._assistant_closings = [mark.closing for mark in marks if mark.role == "assistant"]
        first = _rendered(tokenizer, [Message("user", A)])
        user = next((mark for mark in marks if mark.role == "user"), None)
        piece = f"{user.opening}{A}{user.closing}" if user else ""
        self._prologue = self._as_decoded(first.removesuffix(piece))  # what stands before the first message
        prompting = _rendered(tokenizer, [Message("user", A)], add_generation_prompt=True)
        self._generation = self._as_decoded(prompting.removeprefix(first))
        probe = f"{first} {B}"
        self._gap = "" if self._as_decoded(probe) == probe else " ?"  # a word-level tokenizer forgets its spaces
        self._patterns = self._patterns_of(marks)

    def turns(self, trajectory: Trajectory) -> list[TurnText]:
        """Every turn as text: what is there to read whatever the template did."""
        return [
            TurnText(
                prompt=self._decoded(prompt.tokens),
                action=self._decoded(prompt.sampled),
                new_branch=prompt.new_branch,
            )
            for prompt in _prompts(trajectory)
        ]

    def read(self, trajectory: Trajectory) -> Transcript:
        """The messages and how true they are, and the text of every turn."""
        messages = self._messages(_prompts(trajectory))
        return Transcript(
            messages=messages or [],
            fidelity=Fidelity.NONE if messages is None else self._fidelity(trajectory, messages),
            turns=self.turns(trajectory),
        )

    def _messages(self, prompts: list[_Prompt]) -> list[Message] | None:
        """The whole conversation; None unless `Chat` makes the recorded prompts of it."""
        chat, said, ended_with = Chat(self._tokenizer), list[Message](), None
        for prompt in prompts:
            heard = self._heard(prompt, ended_with=ended_with)
            if heard is None or not _gives(chat, heard, prompt, opening=not said):
                return None
            said += [*heard, Message("assistant", chat.reply(prompt.sampled))]
            ended = prompt.sampled[-1] in self._unsaid
            ended_with = self._decoded(prompt.sampled[-1:]) if ended else ""
        return said

    def _heard(self, prompt: _Prompt, *, ended_with: str | None) -> tuple[Message, ...] | None:
        """What the environment may have said in `prompt`, behind a reply that `ended_with` a special token or "".

        None where it is not made of messages.
        """
        text = self._decoded(prompt.tokens)
        if ended_with is None or prompt.new_branch:
            starts = [self._prologue, ""]
        else:
            starts = [self._as_decoded(closing.removeprefix(ended_with)) for closing in self._assistant_closings]
        readings = [self._cut(text[len(start) :]) for start in dict.fromkeys(starts) if text.startswith(start)]
        messages = next((reading for reading in readings if reading is not None), None)
        if messages is None:
            return None
        return tuple(messages if ended_with is None else _behind_the_last_reply(messages))

    def _cut(self, text: str) -> list[Message] | None:
        """The messages that `text` is made of; None where it is not made of messages alone."""
        messages, position = list[Message](), 0
        while text[position:].strip(" ") != self._generation.strip(" "):
            for role, pattern in self._patterns:
                found = pattern.match(text, position)
                if found:
                    messages.append(Message(role, found[1]))
                    position = found.end()
                    break
            else:
                return None
        return messages

    def _patterns_of(self, marks: list[_Mark]) -> list[tuple[str, re.Pattern[str]]]:
        """For each mark, the longest opening first, a message of its role with another or the end behind it."""
        gap = self._gap
        openings = {re.escape(self._as_decoded(mark.opening)) for mark in marks}
        ends = [*sorted(openings), re.escape(self._generation) + r"\Z"]
        behind = f"(?={gap}(?:{'|'.join(ends)}))"
        return [
            (
                mark.role,
                re.compile(
                    f"{gap}{re.escape(self._as_decoded(mark.opening))}{gap}(.*?)"
                    f"{gap}{re.escape(self._as_decoded(mark.closing))}{behind}",
                    re.DOTALL,
                ),
            )
            for mark in sorted(marks, key=lambda mark: -len(mark.opening))
        ]

    def _fidelity(self, trajectory: Trajectory, messages: list[Message]) -> Fidelity:
        whole = self._encoded(_rendered(self._tokenizer, messages))
        recorded = trajectory.token_array().tolist()
        return Fidelity.TOKENS if whole[: len(recorded)] == recorded else Fidelity.PROMPTS

    def _as_decoded(self, text: str) -> str:
        return self._decoded(self._encoded(text))

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _prompts(trajectory: Trajectory) -> list[_Prompt]:
    tokens, prompts, stop = trajectory.token_array().tolist(), [], 0
    for turn in trajectory.turns:
        new_branch = stop > 0 and any(stop <= start < turn.start for start in trajectory.branch_starts)
        prompts.append(
            _Prompt(tokens=tokens[stop : turn.start], sampled=tokens[turn.start : turn.stop], new_branch=new_branch)
        )
        stop = turn.stop
    return prompts


def _gives(chat: Chat, heard: tuple[Message, ...], prompt: _Prompt, *, opening: bool) -> bool:
    """Whether `chat`, told `heard`, writes exactly `prompt`."""
    try:
        if opening:
            return chat.open(heard) == prompt.tokens
        return chat.extend(heard) == Extension(tokens=prompt.tokens, new_branch=prompt.new_branch)
    except TemplateError:
        return False


def _behind_the_last_reply(messages: list[Message]) -> list[Message]:
    last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return messages[last + 1 :]


def _marks(tokenizer: PreTrainedTokenizerBase) -> list[_Mark]:
    """What surrounds the words of each role, wherever the template takes a message of that role."""
    asked, answered = Message("user", A), Message("assistant", B)
    marks: list[_Mark] = []
    for before, role, behind in (
        ([asked, answered], "user", []),
        ([asked], "assistant", []),
        ([asked], "assistant", [asked]),  # some write an answer otherwise once there is a question behind it
        ([asked, answered], "tool", []),
        ([], "system", [asked]),
    ):
        try:
            mark = _mark(tokenizer, before, role, behind, marks)
        except (TemplateError, TypeError):  # a template refuses a role by the first, and chokes on one by the second
            continue
        if mark is not None and mark not in marks:
            marks.append(mark)
    return marks


def _mark(
    tokenizer: PreTrainedTokenizerBase, before: list[Message], role: str, behind: list[Message], known: list[_Mark]
) -> _Mark | None:
    whole = _rendered(tokenizer, [*before, Message(role, PROBE), *behind])
    standing = _rendered(tokenizer, before) if before else ""
    rest = ""
    if behind:
        user = next(mark for mark in known if mark.role == "user")
        rest = f"{user.opening}{behind[0].content}{user.closing}"
    if not whole.startswith(standing) or not whole.endswith(rest) or whole.count(PROBE) != 1:
        return None
    opening, closing = whole[len(standing) : len(whole) - len(rest)].split(PROBE)
    return _Mark(role=role, opening=opening, closing=closing) if opening or closing else None


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Iterable[Message], *, add_generation_prompt: bool = False
) -> str:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt))
