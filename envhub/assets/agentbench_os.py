"""`agentbench_os`: AgentBench's tasks in an operating system, from the user's files, in the sandbox.

A task's scripts expect to be root in a container of Ubuntu. Here they get a root directory in which root owns
everything except the host's /usr (`sandbox.Place.ROOT`), and every command is a separate run. If a task's own example
does not pass its checks there, the task is an EnvError, never a reward of 0.
"""

import re
import shlex
from dataclasses import dataclass, field

import msgspec

from slipstream.envhub.assets.agentbench_os_root import root_tree
from slipstream.envhub.assets.agentbench_os_task import OsTask, Script, read_tasks
from slipstream.envhub.env import Env, EnvError
from slipstream.envhub.isolation.file_tree import Tree
from slipstream.envhub.isolation.sandbox import Finished, Limits, Place, require_sandbox, run_in_sandbox
from slipstream.envhub.shell.action import ANSWER, BASH, parse_act, write_bash
from slipstream.envhub.user_files import item_of, read_files
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

MAX_SHOWN_CHARS = 800  # AgentBench's own
MAX_ANSWER_CHARS = 2000
LIMITS = Limits(max_open_files=256)  # of a command or a check
FETCH = (
    "get data/os_interaction of github.com/THUDM/AgentBench, with its folders data and scripts, and give the path of "
    "data (the standard tasks) or of data/dev.json"
)
RULES = (
    "You are root in a Linux system. Think, then act, once a turn. To run a command, write\nAct: bash\n```bash\nCOMMAND"
    "\n```\nEvery command begins in /, in a shell of its own, on the files as the last one left them. When you know "
    "the answer to a question, write Act: answer(ANSWER); when a change that was asked for is done, write Act: finish."
)

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A policy is root and may put its own programs on the PATH. So a check finds the host's programs first.
_CHECKED_PATH = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_LOADED_UNASKED = ("etc/ld.so.", "usr/local/lib/python")
_FAILED = ("Read-only file system", "Operation not permitted", "Invalid argument", "command not found", "[killed")


class OsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tree: Tree | None = None  # None until the first command, before which the task's scripts run
    shown: str | None = None  # the output of the task's example


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    tree: Tree  # after the task's own scripts
    answer: str = ""  # the output of the example on that tree


_PREPARED: dict[OsTask, _Prepared] = {}  # each process prepares a task once


@dataclass(frozen=True, kw_only=True, slots=True)
class OsWorld:
    task: OsTask
    first: OsState = field(default_factory=OsState)

    @property
    def opening(self) -> str:
        return self.task.description

    async def act(self, state: OsState, action: str) -> Change[OsState]:
        act = parse_act(action)
        if act is None or (len(act.text) > MAX_ANSWER_CHARS and act.verb == ANSWER):
            raise InvalidAction("say Act: bash with a command, Act: answer(...) or Act: finish")
        prepared = await prepare(self.task)
        tree = prepared.tree if state.tree is None else state.tree
        if act.verb != BASH:
            answer = act.text if act.verb == ANSWER else None
            right = await is_right(self.task, answer, tree, example=prepared.answer)
            return Change(state=state, text="bye", over=True, score=float(right))
        finished = await run_in_root(act.text, tree)
        is_example = self.task.example is not None and act.text == _printing(self.task.example)
        shown = finished.output.strip() if is_example else state.shown
        left = tree if finished.tree is None else finished.tree
        return Change(state=OsState(tree=left, shown=shown), text=_shown(finished))

    def expert(self, state: OsState) -> str:
        """Return the file's answer, the text of its regex, or its example and then the example's output."""
        if self.task.answer is not None or self.task.regex is not None:
            return f"Act: answer({self.task.answer if self.task.answer is not None else self.task.regex})"
        if self.task.example is None:
            return "Act: finish"
        if state.shown is None:
            return write_bash(_printing(self.task.example))
        return f"Act: answer({state.shown})" if self.task.compares_output else "Act: finish"


def make_agentbench_os_env(*, train: str = "", held_out: str = "") -> Env:
    """Make an environment of AgentBench's operating system tasks. Raises ValueError if files or sandbox are missing.

    `train` and `held_out` are paths of `data`, of one of its folders or of a file in them, with `scripts` next to
    `data`.
    """
    require_sandbox()
    items = read_files(read_tasks, train, held_out, fetch=FETCH)
    return WorldEnv(
        f"agentbench_os {train} {held_out}", make_world=lambda task: OsWorld(task=item_of(task, items)), rules=RULES
    )


async def run_in_root(command: str, tree: Tree) -> Finished:
    return await run_in_sandbox(f"export PATH={_PATH}\n{command}", tree, limits=LIMITS, place=Place.ROOT)


async def prepare(task: OsTask) -> _Prepared:
    """Return the start of `task`. Once in a process, test the task: run its scripts twice, then its example and checks.

    Raises EnvError for a task that does not work here: its scripts fail or differ between two runs, or its example does
    not pass its checks.
    """
    if task not in _PREPARED:
        tree, again = [await _initial(task) for _ in range(2)]
        if tree != again:
            raise EnvError(f"{task.name}: two runs of its init scripts left different files, so attempts would differ")
        _PREPARED[task] = await _rehearsed(task, tree)
    return _PREPARED[task]


async def _initial(task: OsTask) -> Tree:
    tree = root_tree()
    for script in task.init:
        finished = await run_in_root(script.seeded().command(), tree)
        failed = [sign for sign in _FAILED if sign in finished.output]
        if finished.tree is None or failed or (finished.exit_code != 0 and finished.output):
            raise EnvError(
                f"{task.name}: its init script failed here, exit code {finished.exit_code}: {finished.output[-300:]}"
            )
        tree = finished.tree
    return tree


async def _rehearsed(task: OsTask, tree: Tree) -> _Prepared:
    if task.example is None:
        return _Prepared(tree=tree)
    runs = [await run_in_root(_printing(task.example), tree) for _ in range(2)]
    printed = runs[0].output
    if printed != runs[1].output or runs[0].tree is None:
        raise EnvError(f"{task.name}: its example printed {printed[:100]!r}, then {runs[1].output[:100]!r}")
    answer = printed.strip() if task.compares_output else None
    if not await is_right(task, answer, runs[0].tree, example=printed):
        raise EnvError(f"{task.name}: its own example, which printed {printed[:100]!r}, does not pass its checks here")
    return _Prepared(tree=tree, answer=printed)


async def is_right(task: OsTask, answer: str | None, tree: Tree, *, example: str) -> bool:
    """Judge as AgentBench does: the exact answer, a regex that matches in it, or checks that all exit with 0.

    A check gets the answer ("None" without one) and the outputs of the checks before it. For the example among the
    checks, the output is `example`, that on the initial files: a policy cannot change it by changing the files.
    """
    if task.answer is not None:
        return answer == task.answer.strip()
    if task.regex is not None:
        return answer is not None and re.search(task.regex, answer) is not None
    judged = {path: node for path, node in tree.items() if not path.startswith(_LOADED_UNASKED)}
    outputs = [str(answer)]
    for script in task.checks:
        if script is None:
            outputs.append(example)
            continue
        finished = await run_in_root(_checked(script, outputs), judged)
        if finished.exit_code != 0:
            return False
        outputs.append(finished.output)
        judged = judged if finished.tree is None else finished.tree
    return True


def _printing(example: Script) -> str:
    """Return the example's command without stderr: `find` cannot read every folder here, as root can in a container."""
    return f"{example.command()} 2>/dev/null"


def _checked(script: Script, arguments: list[str]) -> str:
    prefix = ["/usr/bin/env", f"PATH={_CHECKED_PATH}", "PYTHONNOUSERSITE=1", "PYTHONSAFEPATH=1"]
    return f"{shlex.join(prefix)} {script.command(*arguments)}"


def _shown(finished: Finished) -> str:
    """Return the output as AgentBench shows and truncates it, with the sandbox's notes."""
    cut = "\n[truncated because the output is too long]"
    output = finished.command_output
    shown = output[: MAX_SHOWN_CHARS - 20] + cut if len(output) > MAX_SHOWN_CHARS else output
    shown += finished.notes
    return f"The output of the OS:\n\n{shown}" if shown.strip() else "The output of the OS is empty."
