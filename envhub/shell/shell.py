"""`shell`: answer questions about a tree of files, or change it, by bash commands in a sandbox.

Each command starts in the home folder, in a new shell, with the files that the last command left.
"""

from dataclasses import dataclass
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_choice
from slipstream.envhub.isolation.file_tree import Tree
from slipstream.envhub.isolation.sandbox import Limits, require_sandbox, run_in_sandbox
from slipstream.envhub.shell.action import ANSWER, BASH, FINISH, parse_act, write_bash
from slipstream.envhub.shell.shell_task import Job, draw_job, draw_tree
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_SHOWN_CHARS = 4000
NUM_FILES = 12
LIMITS = Limits()  # of one command
RULES = (
    "You work in a Linux shell. Think, then act, once a turn. To run a command, write\nAct: bash\n```bash\nCOMMAND\n```"
    "\nEach command starts in your home folder, with the files that the last command left and the same processes. "
    "To answer a question, write Act: answer(ANSWER). If the task is a change, write Act: finish when it is done."
)


class ShellState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tree: Tree
    processes: tuple[str, ...] = ()  # the names of those that run during each command; "" for one that has ended
    is_answer_shown: bool = False  # whether the command that shows the answer has been run


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellWorld:
    opening: str
    first: ShellState
    job: Job

    async def act(self, state: ShellState, action: str) -> Change[ShellState]:
        act = parse_act(action)
        if act is None or (act.verb == (ANSWER if self.job.result is not None else FINISH)):
            ending = "Act: finish" if self.job.result is not None else "Act: answer(...)"
            raise InvalidAction(f"write Act: bash with a command, or {ending}")
        if act.verb != BASH:
            is_done = (state.tree, state.processes) == (self.job.result, self.job.left)
            right = act.text == self.job.answer if act.verb == ANSWER else is_done
            return Change(state=state, text="bye", over=True, score=float(right))
        finished = await run_in_sandbox(act.text, state.tree, limits=LIMITS, processes=state.processes)
        left = ShellState(
            tree=state.tree if finished.tree is None else finished.tree,
            processes=finished.processes,
            is_answer_shown=state.is_answer_shown or act.text == self.job.bash,
        )
        text = finished.shown(MAX_SHOWN_CHARS).rstrip() or f"(no output, exit code {finished.exit_code})"
        return Change(state=left, text=text)

    def expert(self, state: ShellState) -> str:
        if self.job.result is not None:
            return write_bash(self.job.bash) if state == self.first else "Act: finish"
        return f"Act: answer({self.job.answer})" if state.is_answer_shown else write_bash(self.job.bash)


def make_shell_env(*, profile: str = "full", task: str = "any") -> Env:
    """Return a `shell` environment. Raises ValueError for invalid options, and if no sandbox is available.

    `profile`: see `rules_in`. `task`: "read", "write", "processes" or "any".
    """
    check_choice("task", task, ("read", "write", "processes", "any"))
    require_sandbox()
    return WorldEnv(
        f"shell {profile} task={task}", make_world=partial(make_shell, kind=task), rules=rules_in(profile, RULES)
    )


def make_shell(task: Task, *, kind: str) -> ShellWorld:
    rng = task_rng(task, world=f"shell/{kind}/{NUM_FILES}")
    while True:
        tree = draw_tree(rng, num_files=NUM_FILES)
        job = draw_job(rng, tree, task=kind)
        changes = job.result is not None and (job.result != tree or job.left != job.processes)
        has_answer = job.answer not in ("", "0") and job.answer not in job.text
        if (changes or has_answer) and split_of(job.text) == task.split:
            return ShellWorld(opening=job.text, first=ShellState(tree=tree, processes=job.processes), job=job)
