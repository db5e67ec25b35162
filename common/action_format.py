"""The formats of actions: the prompt's instructions and the parser use the same constants."""

import difflib
import re
from dataclasses import dataclass
from typing import Protocol, cast

from common.config_error import ConfigError, require
from common.imported import imported, is_own

_BLOCK = r"```\w+[ \t]*\n.*?```"  # a code block inside an action; its label distinguishes it from the closing marker


_ACTION = "click[red]"  # what a format of the user's is tried with
_CONTRACT = (
    "it is made without arguments, `instructions` is a str, and `parse` returns a ParsedAction for any text, and for "
    "the text of `write` the action, as common.action_format.ActionFormat says"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """The action in a completion; `valid` is False if the completion does not follow the format."""

    text: str
    valid: bool


class ActionFormat(Protocol):
    """One way to write an action."""

    @property
    def instructions(self) -> str:
        """The sentence about the format for the system prompt; empty if there is nothing to say."""

    def write(self, action: str) -> str:
        """`action` as a policy should write it."""

    def parse(self, completion: str) -> ParsedAction:
        """The action in `completion`, which may be any text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """An action between two markers. Empty `opening` and `closing` mean that the whole completion is the action."""

    opening: str
    closing: str
    preamble: str  # what may come before the action, as the prompt asks for it

    @property
    def instructions(self) -> str:
        """What may come before the action, and the markers; empty if actions have none."""
        if not self.opening:
            return ""
        return f"{self.preamble}Write exactly one action as {self.opening}your action{self.closing}."

    def write(self, action: str) -> str:
        """`action` as a policy should write it."""
        return f"{self.opening}{action}{self.closing}"

    def parse(self, completion: str) -> ParsedAction:
        """The action in `completion`; the last one if there are several: later thoughts replace earlier ones."""
        if not self.opening:
            text = completion.strip()
            return ParsedAction(text=text, valid=bool(text))
        opening, closing = _spaced(self.opening), _spaced(self.closing)
        inside = rf"((?:{_BLOCK}|(?!{opening}|{closing}).)*+)"
        found = re.findall(opening + inside + closing, completion, re.DOTALL)
        if not found:
            return ParsedAction(text="", valid=False)
        text = found[-1].strip()
        return ParsedAction(text=text, valid=bool(text))


def _spaced(marker: str) -> str:
    """A pattern for `marker` with optional white space: word-level tokenizers put spaces around punctuation."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", marker)))


FORMATS: dict[str, Marked] = {
    "plain": Marked(opening="", closing="", preamble=""),
    "action_tag": Marked(opening="<action>", closing="</action>", preamble="Think first, in a few words. "),
    "react": Marked(opening="Action: ```", closing="```", preamble="Begin with `Thought:` and your reasoning. "),
}


def action_format(name: str) -> ActionFormat:
    """Return the format `name`, the value of `env.action_format`. Raises ConfigError if no format has that name."""
    if is_own(name):
        return _own_format(name)
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"did you mean {near[0]}?" if near else "see common/action_format.py"
    known = f"one of {', '.join(FORMATS)}, or module:Class for your own"
    require(name in FORMATS, "env.action_format", known, name, hint)
    return FORMATS[name]


def _own_format(name: str) -> ActionFormat:
    """An object of the user's class. Raises ConfigError if it does not parse what it writes."""
    kind = imported("env.action_format", name, type)
    try:
        made = kind()
        is_complete = isinstance(made.instructions, str) and isinstance(made.parse(""), ParsedAction)
        parsed = made.parse(made.write(_ACTION))
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"`env.action_format` {name!r} failed: {type(error).__name__}: {error}; {_CONTRACT}"
        ) from error
    if not is_complete or parsed != ParsedAction(text=_ACTION, valid=True):
        raise ConfigError(
            f"`env.action_format` {name!r} reads {parsed!r} from {made.write(_ACTION)!r}, its own text for the action "
            f"{_ACTION!r}; {_CONTRACT}"
        )
    return cast(ActionFormat, made)
