"""Commands on the repository of an instance: in the sandbox, in /testbed, with the instance's Python environment."""

import shlex

from envhub.file_tree import Tree
from envhub.sandbox import Finished, Limits, Place, run_in_sandbox
from envhub.swe_pytest import without_durations
from envhub.swebench_checkout import PLAIN_INDEX, Checkout
from envhub.swebench_instance import Playable

# Where SWE-bench's own images have them: conda's environments know their path.
ENVIRONMENT = "/opt/miniconda3/envs/testbed"
MAX_SHOWN_CHARS = 10_000
NUM_FIRST_CHARS = 2_000  # of what is too long; of the rest the end is shown, where tests say what came of them


def limits_of(timeout_s: float) -> Limits:
    """What one command may take, with room for a repository in memory and for numerical packages."""
    return Limits(
        wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_bytes=4 << 30, max_processes=256, file_bytes=256 << 20,
        tree_bytes=1 << 30, kept_bytes=8 << 20, output_bytes=4 << 20,
    )  # fmt: skip


async def run_in_testbed(
    command: str, layer: Tree, *, playable: Playable, checkout: Checkout, timeout_s: float
) -> Finished:
    """Run bash's `command` on the checkout with `layer` over it."""
    return await run_in_sandbox(
        f"{_settings(checkout)}\n{command}",
        layer,
        limits=limits_of(timeout_s),
        mounts={playable.environment: ENVIRONMENT},
        place=Place.TESTBED,
        base=checkout.folder,
    )


def of_a_policy(command: str) -> str:
    """`command` in a shell of its own; afterwards git's index is such that equal states are equal bytes."""
    return f"bash --noprofile --norc -c {shlex.quote(command)}\nrc=$?\n({PLAIN_INDEX}) 2>/dev/null\nexit $rc"


def diff_command(checkout: Checkout) -> str:
    """What has changed since the start, new files too, as git says; commits in between do not matter."""
    return (
        "export GIT_INDEX_FILE=/tmp/index; cp .git/index /tmp/index; git add -A -N . && "
        f"git diff --no-color --no-ext-diff {checkout.commit}"
    )


def shown(finished: Finished) -> str:
    said = without_durations(finished.output).rstrip() or f"(no output, exit code {finished.exit_code})"
    if len(said) <= MAX_SHOWN_CHARS:
        return said
    return f"{said[:NUM_FIRST_CHARS]}\n[...]\n{said[NUM_FIRST_CHARS - MAX_SHOWN_CHARS :]}"


def _settings(checkout: Checkout) -> str:
    """For git: whoever works here commits at the time of the first commit, so that the same actions do the same."""
    date = f"@{checkout.commit_time} +0000"
    settings = {"PATH": f"{ENVIRONMENT}/bin:/usr/bin:/bin"}
    for role in ("AUTHOR", "COMMITTER"):
        settings |= {f"GIT_{role}_{name}": value for name, value in
                     (("NAME", "agent"), ("EMAIL", "agent@sandbox"), ("DATE", date))}  # fmt: skip
    return " ".join(["export", *(f"{name}={shlex.quote(value)}" for name, value in settings.items())])
