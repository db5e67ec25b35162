"""Extract a Python program from a policy's text, and run it in the sandbox on inputs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.envhub.isolation.file_tree import Tree, file
from slipstream.envhub.isolation.sandbox import Finished, Limits, run_in_sandbox

MAX_PROGRAM_CHARS = 20_000

_PYTHON = re.compile(r"\s*python\b[:\s]*(.*)", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r".*?```\w*[ \t]*\n(.*?)```.*", re.DOTALL)


def program_in(text: str) -> str:
    """Return the content of the first fenced block of `text`, of any language, or all of `text` without one.

    Empty if the program is too long or is not valid text.
    """
    fenced = _FENCED.fullmatch(text)
    program = fenced[1] if fenced else text
    is_text = program.encode(errors="replace").decode() == program
    return program if is_text and len(program) <= MAX_PROGRAM_CHARS else ""


def program_to_run(action: str) -> str | None:
    """Return the program behind the word `python`, as `program_in`; None for an action that does not begin with it."""
    found = _PYTHON.fullmatch(action)
    return program_in(found[1]) if found else None


async def printed(program: str, files: Tree, *, limits: Limits, max_chars: int) -> str:
    """Run `program` beside `files`, and return the end of what it printed, errors included."""
    name = "own_program.py" if "program.py" in files else "program.py"
    finished = await run_in_sandbox(f"/usr/bin/python3 -I {name}", {**files, name: file(program)}, limits=limits)
    return finished.output.strip()[-max_chars:] or "(nothing)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRun:
    """The result of a program for one input."""

    printed: str
    errors: str  # what it wrote to stderr
    is_complete: bool  # it ended without an error; otherwise an empty output is never correct

    def prints(self, right: str) -> bool:
        """Whether it ended well and printed the words of `right`."""
        return self.is_complete and self.printed.split() == right.split()


async def run_on_inputs(program: str, inputs: Sequence[str], *, limits: Limits) -> list[ProgramRun]:
    """Run `program` once for each input, in one sandbox.

    Each run has an equal share of `limits.wall_s` as CPU time, in whole seconds. All together have twice `wall_s` by
    the clock: on a busy machine a program that needs little time may wait for long.
    """
    tree: Tree = {"program.py": file(program)} | {f"{number}.in": file(text) for number, text in enumerate(inputs)}
    limits = replace(limits, cpu_s=math.ceil(limits.wall_s / len(inputs)), wall_s=2 * limits.wall_s)
    command = (
        f"for i in $(seq 0 {len(inputs) - 1}); do "
        "/usr/bin/python3 -I program.py < $i.in > $i.out 2> $i.err; echo $? > $i.code; done"
    )
    finished = await run_in_sandbox(command, tree, limits=limits)
    return [_run(finished, number) for number in range(len(inputs))]


def _run(finished: Finished, number: int) -> ProgramRun:
    tree = finished.tree or {}
    printed, errors, code = (
        tree[name].content.decode(errors="replace").strip() if name in tree else ""
        for name in (f"{number}.out", f"{number}.err", f"{number}.code")
    )
    return ProgramRun(printed=printed, errors=errors, is_complete=code == "0" and f"{number}.out" in tree)
