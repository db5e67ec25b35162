"""Makes a git repository with one commit, and runs git so that the same commands always leave the same bytes."""

import shlex
import shutil
from pathlib import Path

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Tree, file
from slipstream.envhub.isolation.layer import WHITEOUT, whiteout
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox

FIRST_COMMIT_TIME = 1_700_000_000  # s since 1970

# Rewrites the index without file times and inode numbers, so that the same content is the same bytes. Later, git reads
# the files again to find what changed.
PLAIN_INDEX = (
    "git ls-files -s -z > /tmp/index.list && GIT_INDEX_FILE=.git/index.new git update-index -z --index-info "
    "< /tmp/index.list && mv .git/index.new .git/index"
)
_FIRST_COMMIT = (
    f"git init -q --template= --initial-branch=main && git add -A && git commit -q -m first && {PLAIN_INDEX}"
)


def require_git() -> None:
    """Raise ValueError, with what to install, if git is missing, or is not in /usr, which the sandbox shows."""
    if shutil.which("git") is None or not Path("/usr/bin/git").exists():
        raise ValueError("this environment needs /usr/bin/git, which is missing; run `apt-get install git`")


def git_settings(commit_time: int) -> dict[str, str]:
    """Return git's environment variables: a fixed author and time, so that the same actions make the same commits."""
    fixed = {"NAME": "agent", "EMAIL": "agent@sandbox", "DATE": f"@{commit_time} +0000"}
    return {f"GIT_{role}_{name}": value for role in ("AUTHOR", "COMMITTER") for name, value in fixed.items()}


def export_command(settings: dict[str, str]) -> str:
    return " ".join(["export", *(f"{name}={shlex.quote(value)}" for name, value in settings.items())])


def policy_script(command: str) -> str:
    """Return a script that runs `command` in a new shell, then rewrites git's index so that equal states are equal."""
    return f"bash --noprofile --norc -c {shlex.quote(command)}\nrc=$?\n({PLAIN_INDEX}) 2>/dev/null\nexit $rc"


async def with_first_commit(tree: Tree, *, limits: Limits) -> Tree:
    """Return `tree` as a git repository with one commit. Raises EnvError if git fails."""
    script = f"{export_command(git_settings(FIRST_COMMIT_TIME))}\n{_FIRST_COMMIT}"
    finished = await run_in_sandbox(script, tree, limits=limits)
    if finished.exit_code != 0 or finished.tree is None:
        raise EnvError(f"git could not make a repository in the sandbox: {finished.output.strip()[-500:]}")
    return finished.tree


def with_layer(base: Tree, layer: Tree) -> Tree:
    """Return `base` with the changes of `layer`, as `layer.apply_layer` does on disk; a marker deletes its path."""
    changed = {path: node for path, node in layer.items() if WHITEOUT not in path}
    return {path: node for path, node in base.items() if whiteout(path) not in layer} | changed


def layer_of(base: Tree, tree: Tree) -> Tree:
    """Return the layer of the differences from `base` to `tree`: `with_layer(base, layer_of(base, tree)) == tree`."""
    new = {path: node for path, node in tree.items() if base.get(path) != node and WHITEOUT not in path}
    return new | {whiteout(path): file("") for path in base if path not in tree}
