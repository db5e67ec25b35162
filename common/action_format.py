"""How a policy writes an action: what the prompt asks for and what the parser takes, from the same constants."""

import re
from dataclasses import dataclass

_BLOCK = r"```\w+[ \t]*\n.*?```"  # within an action, as a program stands in one; its label tells it from a closing


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """The action in a completion; `valid` is False where the format was not kept."""

    text: str
    valid: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionFormat:
    """One way to write an action. Empty `opening` and `closing` mean that the whole completion is the action."""

    opening: str
    closing: str
    preamble: str  # what may come before the action, as the prompt asks for it

    @property
    def instructions(self) -> str:
        """What the system prompt says about the format; empty where there is nothing to say."""
        if not self.opening:
            return ""
        return f"{self.preamble}Write exactly one action as {self.opening}your action{self.closing}."

    def write(self, action: str) -> str:
        """`action` as a policy should write it."""
        return f"{self.opening}{action}{self.closing}"

    def parse(self, completion: str) -> ParsedAction:
        """The action in `completion`; the last one where there are several, as later thought supersedes earlier."""
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
    """A pattern for `marker` with white space free, as word-level tokenizers put spaces around every sign."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", marker)))


FORMATS: dict[str, ActionFormat] = {
    "plain": ActionFormat(opening="", closing="", preamble=""),
    "action_tag": ActionFormat(
        opening="<action>", closing="</action>", preamble="Think first, in a few words. "
    ),
    "react": ActionFormat(
        opening="Action: ```", closing="```", preamble="Begin with `Thought:` and your reasoning. "
    ),
}  # fmt: skip
