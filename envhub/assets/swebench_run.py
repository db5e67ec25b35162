"""Run commands in the repository of an instance: in the sandbox, in /testbed, with the instance's environment."""

from slipstream.envhub.assets.swebench_checkout import Checkout
from slipstream.envhub.assets.swebench_instance import Playable
from slipstream.envhub.isolation.file_tree import Tree
from slipstream.envhub.isolation.sandbox import Finished, Limits, Place, run_in_sandbox
from slipstream.envhub.swe.git import export_command, git_settings
from slipstream.envhub.swe.tests import without_durations

# The path in SWE-bench's own images, because conda's environments contain their path.
ENVIRONMENT = "/opt/miniconda3/envs/testbed"
PATH = f"{ENVIRONMENT}/bin:/usr/bin:/bin"
MAX_SHOWN_CHARS = 10_000
NUM_FIRST_CHARS = 2_000  # shown of an output that is too long; then its end, which has the results of tests


async def run_in_testbed(
    command: str, layer: Tree, *, playable: Playable, checkout: Checkout, timeout_s: float
) -> Finished:
    """Run bash's `command` on the checkout with `layer` over it."""
    limits = Limits(  # large enough for a repository in memory and for numerical packages
        wall_s=timeout_s,
        cpu_s=int(timeout_s) + 1,
        memory_bytes=4 << 30,
        max_processes=256,
        max_open_files=256,
        max_waiting=128,  # as the web servers of tests ask for
        file_bytes=256 << 20,
        tree_bytes=1 << 30,
        kept_bytes=8 << 20,
        output_bytes=4 << 20,
    )
    return await run_in_sandbox(
        f"{export_command({'PATH': PATH, **git_settings(checkout.commit_time)})}\n{command}",
        layer,
        limits=limits,
        mounts={playable.environment: ENVIRONMENT},
        place=Place.TESTBED,
        base=checkout.folder,
    )


def diff_command(checkout: Checkout) -> str:
    """Return a git command that shows all changes since the start, with new files and across commits."""
    return (
        "export GIT_INDEX_FILE=/tmp/index; cp .git/index /tmp/index; git add -A -N . && "
        f"git diff --no-color --no-ext-diff {checkout.commit}"
    )


def shown(finished: Finished) -> str:
    """Return the output of a command, with its middle cut if it is too long."""
    output = without_durations(finished.output).rstrip() or f"(no output, exit code {finished.exit_code})"
    if len(output) <= MAX_SHOWN_CHARS:
        return output
    return f"{output[:NUM_FIRST_CHARS]}\n[...]\n{output[NUM_FIRST_CHARS - MAX_SHOWN_CHARS :]}"
