"""`swe`: repair a small Python package in a git repository: view files, edit them, run the tests, submit.

As in SWE-bench (https://arxiv.org/abs/2310.06770), hidden tests judge the repair: those that must pass now
(FAIL_TO_PASS) and those that must still pass (PASS_TO_PASS). They use only the files of the package, because a policy
may change the tests that it sees.
"""

import difflib
import re
from dataclasses import dataclass, field
from functools import partial

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_choice, check_range
from slipstream.envhub.isolation.file_tree import Tree, TreeError, file, folder
from slipstream.envhub.isolation.sandbox import MAX_COMMAND_CHARS, Limits, require_room, run_in_sandbox
from slipstream.envhub.swe import git, tests
from slipstream.envhub.swe.file_edits import cut, edited, lines_of, numbered, text_of
from slipstream.envhub.swe.repo import Repo, draw_name, draw_repo
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction, WorldEnv, rules_in

MAX_FILE_CHARS = 20_000
LIMITS = Limits(wall_s=20.0)  # of one test run or command
RULES = (
    "Repair the bugs of a Python package; the docstring of a function says what it should do. `view PATH` shows a file "
    "with line numbers. `edit PATH FIRST-LAST`, followed by new lines, bare or in a block, ```python ... ```, replaces "
    "the lines FIRST to LAST by them; without new lines it deletes these lines, and 5-4 inserts before line 5. `test` "
    "runs the tests, `diff` shows your changes, `submit` ends the task. `bash`, followed by a command, bare or in a "
    "block, runs it in the git repository, each time in a new shell."
)

_ACTION = re.compile(
    r"(?:(?P<verb>test|diff|submit)|view\s+(?P<viewed>\S+)|"
    r"edit\s+(?P<edited>\S+)[ \t]+(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?[ \t]*(?P<text>\n.*)?|"
    r"bash\b:?\s*(?:```\w*[ \t]*\n(?P<block>.*?)\n?```|(?P<command>\S.*)))",
    re.IGNORECASE | re.DOTALL,
)


class SweState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layer: Tree = {}  # the changes since the start; from the first bash command on, also the files of git
    seen: frozenset[str] = frozenset()  # paths of the files that were viewed
    is_tested: bool = False  # whether the tests have been run on the current files


@dataclass(frozen=True, kw_only=True, slots=True)
class SweWorld:
    """One repository with bugs, and how much the opening says about them."""

    opening: str
    issue: str
    repo: Repo
    first: SweState = field(default_factory=SweState)

    async def act(self, state: SweState, action: str) -> Change[SweState]:
        found = _ACTION.fullmatch(action.strip())
        if found is None:
            raise InvalidAction("write view PATH, edit PATH FIRST-LAST, test, bash COMMAND, diff or submit")
        tree = git.with_layer(self.tree, state.layer)
        match (found["verb"] or "").lower():
            case "test":
                text = await tests.run_tests(tree, limits=LIMITS)
                return Change(state=msgspec.structs.replace(state, is_tested=True), text=text)
            case "diff":
                return Change(state=state, text=cut(_diff(self.tree, tree)) or "nothing is changed")
            case "submit":
                return Change(state=state, text="submitted", over=True, score=float(await self._is_resolved(tree)))
        command = found["command"] if found["block"] is None else found["block"]
        if command is not None:
            return await self._run(state, command)
        path = found["viewed"] or found["edited"]
        content = text_of(tree.get(path))
        if content is None:
            raise InvalidAction(f"no file {path}"[:80])
        if found["viewed"]:
            text = numbered(lines_of(content), first=1)
            return Change(state=msgspec.structs.replace(state, seen=state.seen | {path}), text=text or "(empty)")
        return self._edited(state, path, content, found)

    def expert(self, state: SweState) -> str:
        """View each wrong file, repair it, run the tests, submit. If the opening names no bug, run the tests first."""
        if self.issue == "none" and not state.layer and not state.seen and not state.is_tested:
            return "test"
        tree = git.with_layer(self.tree, state.layer)
        for path, right in self.repo.right_files.items():
            content = text_of(tree.get(path))
            if content is None:
                return f"bash git checkout -q -f {path}"
            if content != right and path.startswith(f"{self.repo.package}/"):
                return _repair(path, content, right) if path in state.seen else f"view {path}"
        return "submit" if state.is_tested else "test"

    @property
    def tree(self) -> Tree:
        """The repository at the start, without the files of git."""
        folders: Tree = {path.split("/")[0]: folder() for path in self.repo.files}
        return folders | {path: file(content) for path, content in self.repo.files.items()}

    async def _is_resolved(self, tree: Tree) -> bool:
        package = self.repo.package
        modules = {
            path: node
            for path, node in tree.items()
            if node.kind in ("file", "folder") and (path == package or path.startswith(f"{package}/"))
        }
        passed = await tests.passed_tests(modules, self.repo.tests, limits=LIMITS)
        return passed == self.repo.tests.keys()

    async def _run(self, state: SweState, command: str) -> Change[SweState]:
        """Run `command` in bash, in the git repository, which is made before the first command."""
        if len(command) > MAX_COMMAND_CHARS or "\0" in command or command.encode(errors="replace").decode() != command:
            raise InvalidAction(f"a command must be valid text of at most {MAX_COMMAND_CHARS} characters")
        layer = state.layer
        if ".git" not in layer:
            layer = layer | git.layer_of(self.tree, await git.with_first_commit(self.tree, limits=LIMITS))
        settings = git.git_settings(git.FIRST_COMMIT_TIME) | tests.PATHS
        finished = await run_in_sandbox(
            f"{git.export_command(settings)}\n{git.policy_script(command)}",
            git.with_layer(self.tree, layer),
            limits=LIMITS,
            mounts=tests.pytest_mounts(),
        )
        text = tests.without_durations(finished.output).rstrip()[-tests.MAX_SHOWN_CHARS :]
        if finished.tree is not None:
            layer = git.layer_of(self.tree, finished.tree)
        is_tested = state.is_tested and _without_git(layer) == _without_git(state.layer)
        left = SweState(layer=layer, seen=state.seen, is_tested=is_tested)
        return Change(state=left, text=text or f"(no output, exit code {finished.exit_code})")

    def _edited(self, state: SweState, path: str, content: str, found: re.Match[str]) -> Change[SweState]:
        done = edited(path, content, found, max_chars=MAX_FILE_CHARS)
        tree = git.with_layer(self.tree, state.layer)
        tree |= {path: file(done.content, tree[path].mode)}
        try:
            require_room(tree, limits=LIMITS)
        except TreeError as error:
            raise InvalidAction(f"the files are too large: {error}") from None
        layer = git.layer_of(self.tree, tree)
        is_tested = state.is_tested and done.content == content
        return Change(state=SweState(layer=layer, seen=state.seen, is_tested=is_tested), text=done.text)


def make_swe_env(*, profile: str = "full", files: int = 2, bugs: int = 1, issue: str = "example") -> Env:
    """Return a `swe` environment. Raises ValueError for invalid options, and if git, pytest or the sandbox is missing.

    `profile`: see `rules_in`. `files`: the number of modules, each with a file of tests. `bugs`: the number of wrong
    functions. `issue`: what the opening says about them: "example" (a failing call), "function" (the name) or "none".
    """
    check_range("files", files, 1, 5)
    check_range("bugs", bugs, 1, 3)
    check_choice("issue", issue, ("example", "function", "none"))
    tests.require_pytest()
    git.require_git()
    return WorldEnv(
        f"swe {profile} files={files} bugs={bugs} issue={issue}",
        make_world=partial(make_swe, num_files=files, num_bugs=bugs, issue=issue),
        rules=rules_in(profile, RULES),
    )


def make_swe(task: Task, *, num_files: int, num_bugs: int, issue: str) -> SweWorld:
    rng = task_rng(task, world=f"swe/{num_files}/{num_bugs}")
    while True:
        package = draw_name(rng)
        if split_of(package) != task.split:  # every text of the task contains this name
            continue
        repo = draw_repo(rng, split=task.split, package=package, num_files=num_files, num_bugs=num_bugs)
        if repo is not None:
            return SweWorld(opening=_opening_text(repo, issue), issue=issue, repo=repo)


def _opening_text(repo: Repo, issue: str) -> str:
    issue_lines = {
        "example": repo.examples,
        "function": tuple(f"{name} is wrong" for name in repo.bugs),
        "none": ("some tests fail",),
    }[issue]
    paths = [path for path in repo.files if not path.endswith("__init__.py")]
    return "\n".join([f"files: {' '.join(paths)}", *issue_lines])


def _without_git(layer: Tree) -> Tree:
    return {path: node for path, node in layer.items() if path.split("/")[0] != ".git"}


def _diff(before: Tree, after: Tree) -> str:
    """Return a diff of the text of all files but those of git."""
    lines: list[str] = []
    for path in sorted(_without_git(before | after)):
        old, new = (tree[path].content.decode(errors="replace") if path in tree else "" for tree in (before, after))
        if max(len(old), len(new)) > MAX_FILE_CHARS:  # a diff of two large files takes long
            lines += [f"{path} is too large to be shown"] if old != new else []
            continue
        lines += difflib.unified_diff(lines_of(old), lines_of(new), path, path, n=0, lineterm="")
    return "\n".join(lines)


def _repair(path: str, content: str, right: str) -> str:
    """Return the action that corrects the first lines that differ."""
    lines, right_lines = content.splitlines(), right.splitlines()
    opcodes = difflib.SequenceMatcher(None, lines, right_lines, autojunk=False).get_opcodes()
    _, start, end, right_start, right_end = next(opcode for opcode in opcodes if opcode[0] != "equal")
    return "\n".join([f"edit {path} {start + 1}-{end}", "```python", *right_lines[right_start:right_end], "```"])
