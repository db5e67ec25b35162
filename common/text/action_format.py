"""The formats of actions: the prompt's instructions and the parser use the same constants."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import regex

from slipstream.common.config.env_config import LABEL, TOOLS, EnvConfig
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.imported import imported, is_own
from slipstream.common.records.message import valid_text
from slipstream.common.records.tool_call import ParsedAnswer

_BLOCK = r"```\w+[ \t]*\n.*?```"  # a code block inside an action; its label distinguishes it from the closing marker
_ACTION = "click[red]"  # what a format of the user's is tried with
_PLACE = "{action}"  # of the action in `write` of a format in `env.formats`
_KEYS = ("instructions", "write", "pattern")  # of a format in `env.formats`
_TRIED_CHARS = 20_000  # the length of the texts that a pattern is tried with
MAX_PATTERN_S = 1.0  # CPU time that a pattern may take for one reply
_CONTRACT = (
    "it is made without arguments, `instructions` is a str, and `parse` returns a ParsedAction for any text, and for "
    "the text of `write` the action, as slipstream.common.text.action_format.ActionFormat says"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """The action in a completion; `valid` is False if the completion does not follow the format."""

    text: str
    valid: bool

    def __post_init__(self) -> None:
        """Make the text valid Unicode: a format, which may be the user's, may have read it from JSON."""
        object.__setattr__(self, "text", valid_text(self.text))


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
        return f"{self.opening}{action}{self.closing}"

    def parse(self, completion: str) -> ParsedAction:
        """The action in `completion`; the last one if there are several: later thoughts replace earlier ones."""
        if not self.opening:
            text = completion.strip()
            return ParsedAction(text=text, valid=bool(text))
        opening, closing = _spaced(self.opening), _spaced(self.closing)
        inside = rf"((?:{_BLOCK}|(?!{opening}|{closing}).)*+)"
        # Not `re`: that of Python 3.11.2, Debian 12's, finds nothing with a group around a possessive quantifier.
        found = regex.findall(opening + inside + closing, completion, regex.DOTALL)
        if not found:
            return ParsedAction(text="", valid=False)
        text = found[-1].strip()
        return ParsedAction(text=text, valid=bool(text))


def _spaced(marker: str) -> str:
    """A pattern for `marker` with optional white space: word-level tokenizers put spaces around punctuation."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", marker)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Defined:
    """A format from `env.formats`: an action between two texts, or found by a pattern."""

    name: str
    instructions: str
    marks: Marked
    pattern: "regex.Pattern[str] | None"  # None: the marks find it

    def write(self, action: str) -> str:
        return self.marks.write(action)

    def parse(self, completion: str) -> ParsedAction:
        """The action in `completion`; the last one if there are several. Raises ValueError if that takes too long."""
        if self.pattern is None:
            return self.marks.parse(completion)
        try:
            found = self.pattern.findall(completion, timeout=MAX_PATTERN_S)
        except TimeoutError:
            raise ValueError(
                f"`env.formats.{self.name}.pattern` took more than {MAX_PATTERN_S:g} s for a text of {len(completion)} "
                "characters; avoid repetitions inside of repetitions, such as (a+)+"
            ) from None
        text = found[-1].strip() if found else ""
        return ParsedAction(text=text, valid=bool(text))


# The tool of an environment whose actions are texts.
ACT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Do one action. The answer is its result.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "description": "the action, as text"}},
            "required": ["action"],
        },
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCalls:
    """Actions are calls of tools: the chat template shows the tools, and the engine's parser reads the calls."""

    instructions: str = ""  # the chat template has its own

    def write(self, action: str) -> str:
        """Raises ConfigError: only a chat template knows how its family writes a call."""
        raise ConfigError(
            "`env.action_format` tools is not possible for a tiny model, a warm start or an expert: they write actions "
            "as text; set `model.path` to a model that calls tools, and warm_start.episodes=0"
        )

    def parse(self, completion: str) -> ParsedAction:
        """Raises ConfigError: the text of a reply is not enough, `called` reads what the engine's parser found."""
        raise ConfigError("`env.action_format` tools reads no text: calls are parsed in the engine's process")


def called(answer: ParsedAnswer, *, as_text: bool) -> ParsedAction:
    """The action of an answer with exactly one valid call: the call as JSON; with `as_text`, what `act` got."""
    if answer.malformed or len(answer.tool_calls) != 1:
        return ParsedAction(text="", valid=False)
    (call,) = answer.tool_calls
    try:
        arguments = json.loads(call.arguments)
        written = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    except RecursionError:  # the parser's process has less on its stack, so it may have read deeper ones
        return ParsedAction(text="", valid=False)
    action = arguments.get("action") if as_text else written
    text = action.strip() if isinstance(action, str) else ""
    return ParsedAction(text=text, valid=bool(text))


# Where a policy predicts the answer to its action. A format predicts if its instructions have the opening.
PREDICTION = Marked(opening="<expect>", closing="</expect>", preamble="")

FORMATS: dict[str, Marked] = {
    "plain": Marked(opening="", closing="", preamble=""),
    "action_tag": Marked(opening="<action>", closing="</action>", preamble="Think first, in a few words. "),
    "react": Marked(opening="Action: ```", closing="```", preamble="Begin with `Thought:` and your reasoning. "),
    "outcome": Marked(
        opening="<action>",
        closing="</action>",
        preamble="Begin with your plan. Then write the answer that you expect to your action as <expect>the answer"
        "</expect>. ",
    ),
}


def format_of(env: EnvConfig) -> ActionFormat:
    """The format of a run's actions. Raises ConfigError."""
    return action_format(env.action_format, env.formats)


def action_format(name: str, defined: Mapping[str, Any] | None = None) -> ActionFormat:
    """Return the format `name`, a value of `env.action_format`; `defined` is `env.formats`.

    Raises ConfigError if no format has that name, and for a format of the user's that does not read what it writes.
    """
    if is_own(name):
        return _own_format(name)
    if defined and name in defined:
        return _defined_format(name, defined[name])
    if name == TOOLS:
        return ToolCalls()
    names = [*FORMATS, TOOLS, *(defined or ())]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "see docs/formats.md"
    known = f"one of {', '.join(names)}, a name that you define in env.formats, or module:Class for your own"
    require(name in names, "env.action_format", known, name, hint)
    return FORMATS[name]


def check_formats(env: EnvConfig) -> None:
    """Raise ConfigError unless `env.action_format` and every format of `env.formats` can be used."""
    for name in (env.action_format, *env.formats):
        action_format(name, env.formats)


def predicts(action_format: ActionFormat) -> bool:
    """Whether the format asks the policy to predict the answer to its action."""
    return PREDICTION.opening in action_format.instructions


def _defined_format(name: str, given: Any) -> Defined:
    """The format that `env.formats.NAME` describes. Raises ConfigError if it cannot be used."""
    key = f"env.formats.{name}"
    is_free = LABEL.fullmatch(name) is not None and name not in {*FORMATS, TOOLS}
    require(is_free, "env.formats", "names of letters, digits and '_' that no built-in format has", name, "rename it")
    is_valid = isinstance(given, Mapping) and all(isinstance(value, str) for value in given.values())
    require(is_valid, key, f"texts by name ({', '.join(_KEYS)})", given, "see docs/formats.md")
    for unknown in given.keys() - set(_KEYS):
        near = difflib.get_close_matches(str(unknown), _KEYS, n=1)
        raise ConfigError(f"unknown key `{key}.{unknown}`; {f'did you mean {near[0]}?' if near else ', '.join(_KEYS)}")
    written = given.get("write", "")
    require(
        written.count(_PLACE) == 1,
        f"{key}.write",
        f"a text with {_PLACE} in it once",
        written,
        "as <act>{action}</act>",
    )
    marks = Marked(opening=written.partition(_PLACE)[0], closing=written.partition(_PLACE)[2], preamble="")
    pattern = _pattern(f"{key}.pattern", given["pattern"]) if "pattern" in given else None
    has_marks = bool(_spaced(marks.opening) and _spaced(marks.closing))
    require(
        pattern is not None or has_marks or written == _PLACE,
        f"{key}.write",
        f"a text with marks before and after {_PLACE}",
        written,
        "or add `pattern`, a regular expression whose only group is the action",
    )
    made = Defined(name=name, instructions=given.get("instructions", marks.instructions), marks=marks, pattern=pattern)
    _check_defined(key, made)
    return made


def _pattern(key: str, text: str) -> "regex.Pattern[str]":
    try:
        pattern = regex.compile(text)
    except regex.error as error:
        raise ConfigError(f"`{key}` must be a regular expression, got {text!r}: {error}; correct it") from None
    require(pattern.groups == 1, key, "a pattern with one group, the action", text, "write other groups as (?:...)")
    return pattern


def _check_defined(key: str, made: Defined) -> None:
    """Raise ConfigError unless `made` reads what it writes, and reads long texts quickly."""
    read = made.parse(made.write(_ACTION))
    require(
        read == ParsedAction(text=_ACTION, valid=True),
        key,
        f"a format that reads {_ACTION!r} from {made.write(_ACTION)!r}",
        read.text,
        "make `pattern` fit `write`",
    )
    try:
        for text in (made.write(_ACTION), made.marks.opening or "a", "a", " ", "a b "):
            made.parse(text * (_TRIED_CHARS // len(text)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _own_format(name: str) -> ActionFormat:
    """An object of the user's class. Raises ConfigError if it does not parse what it writes."""
    kind = imported("env.action_format", name, type)
    try:
        made = kind()
        instructions, of_nothing, parsed = made.instructions, made.parse(""), made.parse(made.write(_ACTION))
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(
            f"`env.action_format` {name!r} failed: {type(error).__name__}: {error}; {_CONTRACT}"
        ) from error
    if not (isinstance(instructions, str) and isinstance(of_nothing, ParsedAction)):
        raise ConfigError(
            f"`env.action_format` {name!r} has the instructions {instructions!r} and reads {of_nothing!r} from an "
            f"empty text; {_CONTRACT}"
        )
    if parsed != ParsedAction(text=_ACTION, valid=True):
        raise ConfigError(
            f"`env.action_format` {name!r} reads {parsed!r} from {made.write(_ACTION)!r}, its own text for the action "
            f"{_ACTION!r}; {_CONTRACT}"
        )
    return cast(ActionFormat, made)
