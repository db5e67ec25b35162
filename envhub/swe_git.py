"""git for whoever works in a repository: a first commit, and commands that leave the same bytes at any time."""

import shlex
import shutil
from pathlib import Path

from envhub.env import EnvError
from envhub.isolation.file_tree import Tree, file
from envhub.isolation.layer import GONE, gone
from envhub.isolation.sandbox import Limits, run_in_sandbox

FIRST_COMMIT_TIME = 1_700_000_000  # s since 1970, of a repository that is made here

# The index without times and numbers of files: the same bytes for the same content. `git` finds out anew what changed.
PLAIN_INDEX = (
    "git ls-files -s -z > /tmp/index.list && GIT_INDEX_FILE=.git/index.new git update-index -z --index-info "
    "< /tmp/index.list && mv .git/index.new .git/index"
)
_FIRST_COMMIT = (
    f"git init -q --template= --initial-branch=main && git add -A && git commit -q -m first && {PLAIN_INDEX}"
)


def require_git() -> None:
    """Raise ValueError, with what to install, where git is missing, here or in the sandbox, which shows /usr."""
    if shutil.which("git") is None or not Path("/usr/bin/git").exists():
        raise ValueError("this environment needs git in /usr/bin, and it is missing: apt-get install git")


def git_settings(commit_time: int) -> dict[str, str]:
    """Whoever works here commits at the time of the first commit, so that the same actions do the same."""
    settings: dict[str, str] = {}
    for role in ("AUTHOR", "COMMITTER"):
        settings |= {f"GIT_{role}_{name}": value for name, value in
                     (("NAME", "agent"), ("EMAIL", "agent@sandbox"), ("DATE", f"@{commit_time} +0000"))}  # fmt: skip
    return settings


def exported(settings: dict[str, str]) -> str:
    return " ".join(["export", *(f"{name}={shlex.quote(value)}" for name, value in settings.items())])


def of_a_policy(command: str) -> str:
    """`command` in a shell of its own; afterwards git's index is such that equal states are equal bytes."""
    return f"bash --noprofile --norc -c {shlex.quote(command)}\nrc=$?\n({PLAIN_INDEX}) 2>/dev/null\nexit $rc"


async def with_first_commit(tree: Tree, *, limits: Limits) -> Tree:
    """`tree` as a git repository of one commit. Raises EnvError where git fails."""
    finished = await run_in_sandbox(
        f"{exported(git_settings(FIRST_COMMIT_TIME))}\n{_FIRST_COMMIT}", tree, limits=limits
    )
    if finished.exit_code != 0 or finished.tree is None:
        raise EnvError(f"git does not make a repository in the sandbox: {finished.output.strip()[-500:]}")
    return finished.tree


def laid(base: Tree, layer: Tree) -> Tree:
    """`layer` over `base`, as `envhub.layer.lay` does on a disk; each path that is gone is in it by itself."""
    here = {path: node for path, node in layer.items() if GONE not in path}
    return {path: node for path, node in base.items() if gone(path) not in layer} | here


def peeled(base: Tree, tree: Tree) -> Tree:
    """What `tree` has other than `base`, so that `laid` gives it again."""
    new = {path: node for path, node in tree.items() if base.get(path) != node and GONE not in path}
    return new | {gone(path): file("") for path in base if path not in tree}
