"""`code`: write a Python program that reads input and prints output. It runs in the sandbox and is judged outside.

The correct outputs never enter the sandbox, so a program can only earn a reward by computing them.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.code.code_task import Problem, draw_problem
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.isolation.program import ProgramRun, program_in, run_on_inputs
from slipstream.envhub.isolation.sandbox import Limits, require_sandbox
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_SHOWN_CHARS = 500  # of one output
NUM_TESTS = 6  # inputs that judge a program
LIMITS = Limits()  # of all inputs together, as `run_on_inputs` takes them
RULES = (
    "Write a Python 3 program that reads its input and prints its output. `run` followed by the program shows what it "
    "prints for the examples; `submit` followed by the program submits it, once. It is then judged on other inputs. "
    "The program may be in a block, ```python ... ```."
)

_ACTION = re.compile(r"\s*(run|submit)\b[:\s]*(.*)", re.IGNORECASE | re.DOTALL)


class CodeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    is_over: bool = False  # there is no other state: a run leaves nothing behind


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeWorld:
    opening: str
    problem: Problem
    first: CodeState = field(default_factory=CodeState)

    async def act(self, state: CodeState, action: str) -> Change[CodeState]:
        found = _ACTION.fullmatch(action)
        program = program_in(found[2]) if found else ""
        if found is None or not program:
            raise InvalidAction("write run or submit, followed by the program")
        if found[1].lower() == "run":
            runs = await run_on_inputs(program, [given for given, _ in self.problem.examples], limits=LIMITS)
            return Change(state=state, text="\n".join(f"Output: {_shown(run) or '(nothing)'}" for run in runs))
        runs = await run_on_inputs(program, [given for given, _ in self.problem.tests], limits=LIMITS)
        passed = sum(run.prints(right) for run, (_, right) in zip(runs, self.problem.tests, strict=True))
        score = passed / len(self.problem.tests)
        return Change(state=CodeState(is_over=True), text=f"{passed} of {len(runs)} passed", over=True, score=score)

    def expert(self, state: CodeState) -> str:
        return f"submit\n```python\n{self.problem.program}```"


def make_code_env(*, profile: str = "full", steps: int = 2) -> Env:
    """Return a `code` environment. Raises ValueError for invalid options, and if no sandbox is available.

    `profile`: see `rules_in`. `steps`: the number of operations in a program.
    """
    check_range("steps", steps, 1, 5)
    require_sandbox()
    return WorldEnv(
        f"code {profile} steps={steps}", make_world=partial(make_code, num_steps=steps), rules=rules_in(profile, RULES)
    )


def make_code(task: Task, *, num_steps: int) -> CodeWorld:
    rng = task_rng(task, world=f"code/{num_steps}/{NUM_TESTS}")
    while True:
        problem = draw_problem(rng, num_steps=num_steps, num_tests=NUM_TESTS)
        outputs = Counter(right for _, right in problem.tests)
        has_various_outputs = max(outputs.values()) <= NUM_TESTS // 2  # one constant must not pass most tests
        # The split depends on the program. By its text, with random examples, one program could be in both splits.
        if has_various_outputs and split_of(problem.program) == task.split:
            return CodeWorld(opening=problem.text, problem=problem)


def _shown(run: ProgramRun) -> str:
    """What it printed, or else the last line of its errors."""
    if run.printed or not run.errors:
        return run.printed[:MAX_SHOWN_CHARS]
    return f"({run.errors.splitlines()[-1]})"[:MAX_SHOWN_CHARS]
