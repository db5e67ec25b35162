"""`code`: write a Python program that reads and prints. It is run in the sandbox, and judged outside by its output.

The right outputs never enter the sandbox, so a program can earn nothing but by printing them.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.code.task import Problem, draw_problem
from envhub.env import Env
from envhub.isolation.file_tree import Tree, file
from envhub.options import check_choice, check_range
from envhub.isolation.program import program_in
from envhub.isolation.sandbox import Finished, Limits, require_sandbox, run_in_sandbox
from envhub.task_seed import split_of, task_rng
from envhub.world import Change, WorldEnv

MAX_SHOWN_CHARS = 500  # of one output
RULES = (
    "Write a Python 3 program that reads its input and prints its output. `run` with the program behind it shows what "
    "it prints for the examples; `submit` with the program behind it hands it in, once. It is then judged by other "
    "inputs. The program may stand in a block, ```python ... ```."
)

_ACTION = re.compile(r"\s*(run|submit)\b[:\s]*(.*)", re.IGNORECASE | re.DOTALL)


class CodeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    is_over: bool = False  # what was run before leaves nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What came of a program and one input."""

    printed: str
    complained: str
    is_whole: bool  # it came to its end, without an error: only then it may be right to have printed nothing

    @property
    def shown(self) -> str:
        """What it printed, else the last line of what it complained of."""
        if self.printed or not self.complained:
            return self.printed[:MAX_SHOWN_CHARS]
        return f"({self.complained.splitlines()[-1]})"[:MAX_SHOWN_CHARS]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeWorld:
    profile: str
    problem: Problem
    limits: Limits  # of all inputs together

    @property
    def opening(self) -> tuple[Message, ...]:
        system = (Message("system", RULES),) if self.profile == "full" else ()
        return (*system, Message("user", self.problem.text))

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.problem.program,)

    @property
    def first(self) -> CodeState:
        return CodeState()

    async def act(self, state: CodeState, action: str) -> Change[CodeState]:
        found = _ACTION.fullmatch(action)
        program = program_in(found[2]) if found else ""
        if found is None or not program:
            return Change(state=state, text="say run or submit, and the program behind it", valid=False)
        if found[1].lower() == "run":
            runs = await self._runs(program, [given for given, _ in self.problem.examples])
            return Change(state=state, text="\n".join(f"Output: {run.shown or '(nothing)'}" for run in runs))
        runs = await self._runs(program, [given for given, _ in self.problem.tests])
        passed = sum(
            run.is_whole and run.printed.split() == right.split()
            for run, (_, right) in zip(runs, self.problem.tests, strict=True)
        )  # fmt: skip
        score = passed / len(self.problem.tests)
        return Change(state=CodeState(is_over=True), text=f"{passed} of {len(runs)} passed", over=True, score=score)

    def admissible(self, state: CodeState) -> None:
        return None

    def expert(self, state: CodeState) -> str:
        return f"submit\n```python\n{self.problem.program}```"

    async def _runs(self, program: str, inputs: list[str]) -> list[_Run]:
        tree: Tree = {"program.py": file(program)} | {f"{number}.in": file(text) for number, text in enumerate(inputs)}
        each_s = self.limits.wall_s / len(inputs)
        command = (
            f"for i in $(seq 0 {len(inputs) - 1}); do timeout -s KILL {each_s:.3f} "
            "/usr/bin/python3 -I program.py < $i.in > $i.out 2> $i.err; echo $? > $i.code; done"
        )
        finished = await run_in_sandbox(command, tree, limits=self.limits)
        return [_run(finished, number) for number in range(len(inputs))]


def make_code_env(*, profile: str = "full", steps: int = 2, tests: int = 6, timeout_s: float = 10.0) -> Env:
    """An environment of programs to write. Raises ValueError for options that do not fit, and where no sandbox is.

    `profile` is "small" (no system message) or "full" (the rules are told), `steps` how much a program has to do,
    `tests` how many inputs judge it, `timeout_s` what all of them may take together.
    """
    check_choice("profile", profile, ("small", "full"))
    check_range("steps", steps, 1, 5)
    check_range("tests", tests, 1, 20)
    require_sandbox()
    return WorldEnv(
        f"code {profile} steps={steps} tests={tests}",
        state=CodeState,
        make_world=partial(
            make_code, profile=profile, num_steps=steps, num_tests=tests, limits=Limits(wall_s=float(timeout_s))
        ),
    )


def make_code(task: Task, *, profile: str, num_steps: int, num_tests: int, limits: Limits) -> CodeWorld:
    """The problem of `task`. Raises ValueError for a split that does not exist."""
    rng = task_rng(task, world=f"code/{num_steps}/{num_tests}")
    while True:
        problem = draw_problem(rng, num_steps=num_steps, num_tests=num_tests)
        outputs = Counter(right for _, right in problem.tests)
        is_told_apart = max(outputs.values()) <= max(1, num_tests // 2)  # from a program that prints one thing always
        # By the program: by the text, whose examples are drawn, one program would be asked for in both splits.
        if is_told_apart and split_of(problem.program) == task.split:
            return CodeWorld(profile=profile, problem=problem, limits=limits)


def _run(finished: Finished, number: int) -> _Run:
    tree = finished.tree or {}
    printed, complained, code = (
        tree[name].content.decode(errors="replace").strip() if name in tree else ""
        for name in (f"{number}.out", f"{number}.err", f"{number}.code")
    )
    return _Run(printed=printed, complained=complained, is_whole=code == "0" and f"{number}.out" in tree)
