"""`swe`: repair a small Python repository, which is a git repository: look, edit, run its tests, hand it in.

Judged by tests that must pass now (FAIL_TO_PASS) and tests that must go on passing (PASS_TO_PASS), as in SWE-bench
(https://arxiv.org/abs/2310.06770), on the package's own files only: the tests that a policy sees are its to change.
"""

import difflib
import re
from dataclasses import dataclass
from functools import partial

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.env import Env
from envhub.isolation.file_tree import Node, Tree, TreeError, file, folder
from envhub.options import check_choice, check_range
from envhub.isolation.sandbox import MAX_COMMAND_CHARS, Limits, require_room, run_in_sandbox
from envhub.swe.edit import edited, lines_of, numbered
from envhub.swe_git import (
    FIRST_COMMIT_TIME,
    exported,
    git_settings,
    laid,
    of_a_policy,
    peeled,
    require_git,
    with_first_commit,
)
from envhub.swe.tests import (
    MAX_SHOWN_CHARS,
    PATHS,
    passed_tests,
    pytest_mounts,
    require_pytest,
    run_tests,
    without_durations,
)
from envhub.swe.repo import Repo, draw_name, draw_repo
from envhub.task_seed import split_of, task_rng
from envhub.world import Change, WorldEnv

MAX_FILE_CHARS = 20_000
ISSUES = ("example", "function", "none")
RULES = (
    "Repair the bugs of a Python package; what a function should do stands under its name. `view PATH` shows a file "
    "with the numbers of its lines. `edit PATH FIRST-LAST`, and new lines behind it, perhaps in a block, "
    "```python ... ```, puts these in the place of the lines FIRST to LAST; none behind it deletes them, and 5-4 puts "
    "them before line 5. `test` runs the tests, `diff` shows what you changed, `submit` ends it. `bash`, and a command "
    "behind it, perhaps in a block, runs that in the repository, a git repository, each time in a new shell."
)

_ACTION = re.compile(
    r"(?:(?P<verb>test|diff|submit)|view\s+(?P<viewed>\S+)|"
    r"edit\s+(?P<edited>\S+)[ \t]+(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?[ \t]*(?P<text>\n.*)?|"
    r"bash\b:?\s*(?:```\w*[ \t]*\n(?P<block>.*?)\n?```|(?P<command>\S.*)))",
    re.IGNORECASE | re.DOTALL,
)


class SweState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layer: Tree = {}  # what is other than at first; git's own files from the first command on
    seen: frozenset[str] = frozenset()  # paths of the files that were looked at
    is_tested: bool = False  # whether the tests were run on the files as they are


@dataclass(frozen=True, kw_only=True, slots=True)
class SweWorld:
    """One repository with bugs, and what is told of them."""

    profile: str
    issue: str
    repo: Repo
    limits: Limits  # of one run of tests

    @property
    def opening(self) -> tuple[Message, ...]:
        system = (Message("system", RULES),) if self.profile == "full" else ()
        return (*system, Message("user", _opening_text(self.repo, self.issue)))

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(bug.right.strip() for bug in self.repo.bugs)

    @property
    def first(self) -> SweState:
        return SweState()

    async def act(self, state: SweState, action: str) -> Change[SweState]:
        found = _ACTION.fullmatch(action.strip())
        if found is None:
            said = "say view PATH, edit PATH FIRST-LAST, test, bash COMMAND, diff or submit"
            return Change(state=state, text=said, valid=False)
        tree = laid(self.tree, state.layer)
        match (found["verb"] or "").lower():
            case "test":
                said = await run_tests(tree, limits=self.limits)
                return Change(state=msgspec.structs.replace(state, is_tested=True), text=said)
            case "diff":
                return Change(state=state, text=_diff(self.tree, tree) or "nothing is changed")
            case "submit":
                return Change(state=state, text="handed in", over=True, score=float(await self._is_resolved(tree)))
        command = found["command"] if found["block"] is None else found["block"]
        if command is not None:
            return await self._run(state, command)
        path = found["viewed"] or found["edited"]
        content = _text(tree.get(path))
        if content is None:
            return Change(state=state, text=f"no file {path}"[:80], valid=False)
        if found["viewed"]:
            text = numbered(lines_of(content), first=1)
            return Change(state=msgspec.structs.replace(state, seen=state.seen | {path}), text=text or "(empty)")
        return self._edited(state, path, content, found)

    def admissible(self, state: SweState) -> None:
        return None

    def expert(self, state: SweState) -> str:
        """Run the tests where nothing is told, look at each wrong file and repair it, run the tests, hand it in."""
        if self.issue == "none" and not state.layer and not state.seen and not state.is_tested:
            return "test"
        tree = laid(self.tree, state.layer)
        for path, right in self.repo.right_files.items():
            content = _text(tree.get(path))
            if content is None:
                return f"bash git checkout -q -f {path}"
            if content != right and path.startswith(f"{self.repo.package}/"):
                return _repair(path, content, right) if path in state.seen else f"view {path}"
        return "submit" if state.is_tested else "test"

    @property
    def tree(self) -> Tree:
        """The repository at first, without git's own files."""
        folders: Tree = {path.split("/")[0]: folder() for path in self.repo.files}
        return folders | {path: file(content) for path, content in self.repo.files.items()}

    async def _is_resolved(self, tree: Tree) -> bool:
        package = self.repo.package
        modules = {
            path: node
            for path, node in tree.items()
            if node.kind in ("file", "folder") and (path == package or path.startswith(f"{package}/"))
        }
        passed = await passed_tests(modules, self.repo.tests, limits=self.limits)
        return self.repo.fail_to_pass | self.repo.pass_to_pass <= passed

    async def _run(self, state: SweState, command: str) -> Change[SweState]:
        """Run bash's `command`: in a repository of one commit, or as the commands before it left git's files."""
        if len(command) > MAX_COMMAND_CHARS or "\0" in command or command.encode(errors="replace").decode() != command:
            return Change(state=state, text="a command is text, and not as long as that", valid=False)
        layer = state.layer
        if ".git" not in layer:
            layer = layer | peeled(self.tree, await with_first_commit(self.tree, limits=self.limits))
        settings = git_settings(FIRST_COMMIT_TIME) | PATHS
        finished = await run_in_sandbox(
            f"{exported(settings)}\n{of_a_policy(command)}",
            laid(self.tree, layer),
            limits=self.limits,
            mounts=pytest_mounts(),
        )
        said = without_durations(finished.output).rstrip()[-MAX_SHOWN_CHARS:]
        if finished.tree is not None:
            layer = peeled(self.tree, finished.tree)
        is_tested = state.is_tested and _without_git(layer) == _without_git(state.layer)
        left = SweState(layer=layer, seen=state.seen, is_tested=is_tested)
        return Change(state=left, text=said or f"(no output, exit code {finished.exit_code})")

    def _edited(self, state: SweState, path: str, content: str, found: re.Match[str]) -> Change[SweState]:
        first = int(found["first"])
        done = edited(path, content, first=first, last=int(found["last"] or first), text=found["text"] or "",
                      max_chars=MAX_FILE_CHARS)  # fmt: skip
        if done.content is None:
            return Change(state=state, text=done.said, valid=False)
        tree = laid(self.tree, state.layer)
        tree |= {path: file(done.content, tree[path].mode)}
        try:
            require_room(tree, limits=self.limits)
        except TreeError as error:
            return Change(state=state, text=f"the files cannot be kept: {error}", valid=False)
        layer = peeled(self.tree, tree)
        is_tested = state.is_tested and done.content == content
        return Change(state=SweState(layer=layer, seen=state.seen, is_tested=is_tested), text=done.said)


def make_swe_env(
    *, profile: str = "full", files: int = 2, bugs: int = 1, issue: str = "example", test_timeout_s: float = 20.0
) -> Env:
    """An environment of repositories. Raises ValueError for options that do not fit, and where pytest cannot be run.

    `profile` is "small" (no system message) or "full" (the rules are told), `files` how many there are beside their
    tests, `bugs` how many functions are wrong, `issue` what is told of them: "example" (a call), "function" or "none",
    `test_timeout_s` what one run of the tests may take.
    """
    check_choice("profile", profile, ("small", "full"))
    check_range("files", files, 1, 5)
    check_range("bugs", bugs, 1, 3)
    check_choice("issue", issue, ISSUES)
    require_pytest()
    require_git()
    return WorldEnv(
        f"swe {profile} files={files} bugs={bugs} issue={issue}",
        state=SweState,
        make_world=partial(
            make_swe,
            profile=profile,
            num_files=files,
            num_bugs=bugs,
            issue=issue,
            limits=Limits(wall_s=float(test_timeout_s)),
        ),
    )


def make_swe(task: Task, *, profile: str, num_files: int, num_bugs: int, issue: str, limits: Limits) -> SweWorld:
    """The repository of `task`. Raises ValueError for a split that does not exist."""
    rng = task_rng(task, world=f"swe/{num_files}/{num_bugs}")
    while True:
        package = draw_name(rng)
        if split_of(package) != task.split:  # the name is in every text about it
            continue
        repo = draw_repo(rng, split=task.split, package=package, num_files=num_files, num_bugs=num_bugs)
        if repo is not None:
            return SweWorld(profile=profile, issue=issue, repo=repo, limits=limits)


def _opening_text(repo: Repo, issue: str) -> str:
    told = {
        "example": repo.examples,
        "function": tuple(f"{name} is wrong" for name in repo.broken),
        "none": ("some tests fail",),
    }[issue]
    return "\n".join(["files: " + " ".join(path for path in repo.files if not path.endswith("__init__.py")), *told])


def _text(node: Node | None) -> str | None:
    """What is in a file that is text; None where there is none."""
    try:
        return None if node is None or node.kind != "file" else node.content.decode()
    except UnicodeDecodeError:
        return None


def _without_git(layer: Tree) -> Tree:
    return {path: node for path, node in layer.items() if path.split("/")[0] != ".git"}


def _diff(before: Tree, after: Tree) -> str:
    """What has changed, as texts; git's own files are not among it."""
    lines: list[str] = []
    for path in sorted(_without_git(before | after)):
        old, new = (tree[path].content.decode(errors="replace") if path in tree else "" for tree in (before, after))
        lines += difflib.unified_diff(lines_of(old), lines_of(new), path, path, n=0, lineterm="")
    return "\n".join(lines)


def _repair(path: str, content: str, right: str) -> str:
    """The edit of the first lines that differ."""
    lines, right_lines = content.splitlines(), right.splitlines()
    steps = difflib.SequenceMatcher(None, lines, right_lines, autojunk=False).get_opcodes()
    _, start, end, right_start, right_end = next(step for step in steps if step[0] != "equal")
    return "\n".join([f"edit {path} {start + 1}-{end}", "```python", *right_lines[right_start:right_end], "```"])
