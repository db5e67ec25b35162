"""`swebench`: SWE-bench's instances, from the user's files, clones and Python environments, in the sandbox.

A policy works in the repository as it was before the repair. An instance is resolved, as in SWE-bench, if all tests in
FAIL_TO_PASS and PASS_TO_PASS pass after the instance's test patch has been applied.
"""

import asyncio
import os
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.envhub.assets.swebench_checkout import Checkout, check_out
from slipstream.envhub.assets.swebench_instance import Playable, read_playable
from slipstream.envhub.assets.swebench_judge import is_resolved
from slipstream.envhub.assets.swebench_run import diff_command, run_in_testbed, shown
from slipstream.envhub.env import Env
from slipstream.envhub.isolation.file_tree import Node, Tree
from slipstream.envhub.isolation.layer import whiteout
from slipstream.envhub.isolation.sandbox import Place, require_sandbox
from slipstream.envhub.swe.file_edits import edited, lines_of, numbered, text_of
from slipstream.envhub.swe.git import policy_script, require_git
from slipstream.envhub.user_files import asset_path, item_of, read_files
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

MAX_ACTION_BYTES = 100_000  # a command is one argument to bash, which the kernel limits to 128 KiB
MAX_FILE_BYTES = 2 << 20  # the largest file that an edit may make
NUM_SHOWN_LINES = 400
COMMAND_S = 60.0
FETCH = (
    "get princeton-nlp/SWE-bench_Lite (or another of its form) from huggingface.co, and give the path of its .parquet, "
    ".jsonl or .json"
)
FETCH_CLONES = "make a folder in which git clone https://github.com/OWNER/NAME OWNER__NAME was run for each repository"
FETCH_ENVIRONMENTS = (
    "make a folder with the Python environment of each instance, INSTANCE_ID/bin/python or OWNER__NAME-VERSION/bin/"
    "python; docs/assets.md explains how"
)
RULES = (
    f"You work on a Python repository, which is in {Place.TESTBED.value}, a git repository. Resolve the issue: change "
    "the code, not the tests; others will judge it. `view PATH` or `view PATH FIRST-LAST` shows a file with the "
    "numbers of its lines. `edit PATH FIRST-LAST`, and new lines behind it, perhaps in a block, ```python ... ```, "
    "puts these in the place of the lines FIRST to LAST; none behind it deletes them, and 5-4 puts them before line 5. "
    "`bash`, and a command behind it, perhaps in a block, runs that in the repository, each time in a new shell; "
    "there is no network. `diff` shows what you changed, `submit` ends it."
)

_ACTION = re.compile(
    r"(?:(?P<verb>diff|submit)|view\s+(?P<viewed>\S+)(?:\s+(?P<from>\d{1,6})-(?P<to>\d{1,6}))?|"
    r"edit\s+(?P<edited>\S+)[ \t]+(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?[ \t]*(?P<text>\n.*)?|"
    r"bash\b:?\s*(?:```\w*[ \t]*\n(?P<block>.*?)\n?```|(?P<command>\S.*)))",
    re.IGNORECASE | re.DOTALL,
)


class SwebenchState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    layer: Tree = {}  # the changes to the checkout, including .git


@dataclass(frozen=True, kw_only=True, slots=True)
class SwebenchWorld:
    playable: Playable
    checkouts: Path
    first: SwebenchState = field(default_factory=SwebenchState)

    @property
    def opening(self) -> str:
        instance = self.playable.instance
        return f"{instance.repo}\n\n{instance.problem_statement}"

    async def act(self, state: SwebenchState, action: str) -> Change[SwebenchState]:
        encoded = action.encode(errors="replace")
        is_text = len(encoded) <= MAX_ACTION_BYTES and encoded.decode() == action and "\0" not in action
        found = _ACTION.fullmatch(action.strip()) if is_text else None
        if found is None:
            raise InvalidAction("say view PATH, edit PATH FIRST-LAST, bash COMMAND, diff or submit")
        checkout = await asyncio.to_thread(check_out, self.playable, self.checkouts)
        command = found["command"] if found["block"] is None else found["block"]
        match (found["verb"] or "").lower():
            case "submit":
                resolved = await is_resolved(state.layer, playable=self.playable, checkout=checkout)
                return Change(state=state, text="handed in", over=True, score=float(resolved))
            case "diff":
                return Change(state=state, text=(await self._run(diff_command(checkout), state, checkout)).text)
        if command is not None:
            return await self._run(policy_script(command), state, checkout)
        path = (found["viewed"] or found["edited"]).removeprefix(f"{Place.TESTBED.value}/")
        node = _node(path, state.layer, checkout.folder)
        content = text_of(node)
        if node is None or content is None:
            raise InvalidAction(f"no file {path} that is text"[:200])
        if found["viewed"]:
            return _viewed(state, path, content, found)
        done = edited(path, content, found, max_chars=MAX_FILE_BYTES)
        layer = {**state.layer, path: Node(kind="file", content=done.content.encode(), mode=node.mode)}
        if layer[path] == _node(path, {}, checkout.folder):
            del layer[path]
        return Change(state=SwebenchState(layer=layer), text=done.text)

    def expert(self, state: SwebenchState) -> str:
        """Return one command that applies the real repair, then `submit`."""
        checkout = check_out(self.playable, self.checkouts)
        if all(state.layer.get(path) == node for path, node in checkout.repaired.items()):
            return "submit"
        new = [path for path, node in checkout.repaired.items() if _node(path, {}, checkout.folder) is None]
        patch = self.playable.instance.patch.rstrip("\n")
        return (
            f"bash\n```bash\ngit reset -q --hard {checkout.commit}; rm -f -- {shlex.join(new)}\n"
            f"git apply --whitespace=nowarn <<'END-OF-PATCH'\n{patch}\nEND-OF-PATCH\n```"
        )

    async def _run(self, command: str, state: SwebenchState, checkout: Checkout) -> Change[SwebenchState]:
        finished = await run_in_testbed(
            command, state.layer, playable=self.playable, checkout=checkout, timeout_s=COMMAND_S
        )
        left = state if finished.tree is None else SwebenchState(layer=finished.tree)
        return Change(state=left, text=shown(finished))


def make_swebench_env(
    *, train: str = "", held_out: str = "", clones: str = "", environments: str = "", checkouts: str = ""
) -> Env:
    """Make an environment of SWE-bench's instances. Raises ValueError if files, git or the sandbox are missing.

    `train` and `held_out` are paths of SWE-bench's files, `clones` is the folder of git clones named OWNER__NAME, and
    `environments` that of Python environments. `checkouts` is a writable folder, in which each instance's repository is
    checked out once.
    """
    require_sandbox()
    require_git()
    if not checkouts or not _is_writable(Path(checkouts)):
        raise ValueError(
            f"`env.options.checkouts` must be a writable folder, got {checkouts!r}; use one on a large disk"
        )
    own = asset_path("clones", clones, fetch=FETCH_CLONES)
    pythons = asset_path("environments", environments, fetch=FETCH_ENVIRONMENTS)
    items = read_files(read_playable, train, held_out, own, pythons, fetch=FETCH)
    return WorldEnv(
        f"swebench {train} {held_out}",
        make_world=lambda task: SwebenchWorld(playable=item_of(task, items), checkouts=Path(checkouts)),
        rules=RULES,
    )


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _node(path: str, layer: Tree, folder: Path) -> Node | None:
    """Return the file at `path` of the repository with `layer` over it; None if it is missing or outside of it."""
    if path in layer:
        return layer[path] if layer[path].kind == "file" else None
    above = path
    while above:
        hidden = layer.get(above)
        if whiteout(above) in layer or (hidden is not None and hidden.kind != "folder"):
            return None
        above = posixpath.dirname(above).rstrip("/")
    if posixpath.isabs(path) or ".." in path.split("/") or posixpath.normpath(path) != path:
        return None
    found = folder.resolve() / path
    if found.resolve() != found or not found.is_file():
        return None
    return Node(kind="file", content=found.read_bytes(), mode=found.stat().st_mode & 0o777)


def _viewed(state: SwebenchState, path: str, content: str, found: re.Match[str]) -> Change[SwebenchState]:
    lines, first = lines_of(content), int(found["from"] or 1)
    last = min(int(found["to"] or len(lines)), first + NUM_SHOWN_LINES - 1, len(lines))
    if lines and not 1 <= first <= last:
        raise InvalidAction(f"{path} has the lines 1 to {len(lines)}")
    rest = f"\n[{path} has the lines 1 to {len(lines)}]" if last - first + 1 < len(lines) else ""
    return Change(state=state, text=(numbered(lines[first - 1 : last], first=first) or "(empty)") + rest)
