"""Parses and writes the actions of a shell agent, in ReAct's format: `Act: bash` with a block, `Act: answer(...)`."""

import re
from dataclasses import dataclass

from slipstream.envhub.isolation.sandbox import MAX_COMMAND_CHARS

BASH, ANSWER, FINISH = "bash", "answer", "finish"

_ACT = re.compile(
    r"(?:.*?\bact(?:ion)?\s*:\s*)?"  # the thought before the action
    r"(?:(?P<bash>bash)\b[\s:]*(?P<command>.*)|answer\s*\((?P<answer>.*)\)\s*|(?P<finish>finish)\s*)",
    re.IGNORECASE | re.DOTALL,
)
_FENCED = re.compile(r"```(?:\w*[ \t]*\n)?(.*?)```.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    verb: str
    text: str = ""  # the command, or the answer


def parse_act(action: str) -> Act | None:
    """Return the parsed `action`; None if it is malformed, too long, or not text that a command may contain."""
    is_text = "\0" not in action and action.encode(errors="replace").decode() == action
    found = _ACT.fullmatch(action) if is_text and len(action) <= MAX_COMMAND_CHARS else None
    if found is None:
        return None
    if found["finish"]:
        return Act(verb=FINISH)
    if found["answer"] is not None:
        return Act(verb=ANSWER, text=found["answer"].strip())
    fenced = _FENCED.fullmatch(found["command"].strip())
    command = (fenced[1] if fenced else found["command"]).strip()
    return Act(verb=BASH, text=command) if command else None


def write_bash(command: str) -> str:
    return f"Act: bash\n```bash\n{command}\n```"
