"""`gaia`: the questions of GAIA from the user's copy, with attached files, a calculator, and Python in the sandbox.

There is no access to the web. Answers are judged by GAIA's quasi-exact match (`envhub/research/gaia_score.py`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_range
from slipstream.envhub.isolation.file_tree import Node
from slipstream.envhub.isolation.program import printed, program_to_run
from slipstream.envhub.isolation.sandbox import Limits, require_sandbox
from slipstream.envhub.research.calculator import calculate
from slipstream.envhub.research.gaia_score import is_gaia_match
from slipstream.envhub.user_files import item_of, read_files, read_records, read_rows
from slipstream.envhub.world import Change, InvalidAction, WorldEnv

MAX_SHOWN_CHARS = 4000
MAX_ATTACHMENT_BYTES = 48 << 20
LIMITS = Limits(  # of a program
    wall_s=30.0,
    cpu_s=31,
    tree_bytes=MAX_ATTACHMENT_BYTES + (16 << 20),
    kept_bytes=MAX_ATTACHMENT_BYTES + (32 << 20),
    file_bytes=MAX_ATTACHMENT_BYTES,
)
UNKNOWN = "?"  # the answers in GAIA's test split
FETCH = (
    "get gaia-benchmark/GAIA from huggingface.co, where its conditions are accepted, and give the path of "
    "2023/validation/metadata.jsonl (or .parquet); keep the attached files in the same folder"
)
RULES = (
    "Answer the question. read(name): the attached file, where it is a text. calculate(expression): + - * / and "
    "brackets. python, and a program behind it, perhaps in a block, ```python ... ```: what it prints; the attached "
    "file lies beside it. End with answer(...): a number, a few words, or a list with commas, and nothing else."
)

_CALL = re.compile(r"\s*(read|calculate|answer)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


class OpenManusItem(msgspec.Struct, kw_only=True):
    """The fields of a row that this environment uses, as OpenManus names them."""

    question: str
    answer: str
    level: int
    file_name: str = ""


class GaiaItem(OpenManusItem, kw_only=True):
    """The same, as GAIA's metadata.jsonl names them."""

    question: str = msgspec.field(name="Question")
    answer: str = msgspec.field(name="Final answer")
    level: int = msgspec.field(name="Level")


class GaiaState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    is_read: bool = False  # whether the policy has read the attached file


@dataclass(frozen=True, kw_only=True, slots=True)
class GaiaWorld:
    item: OpenManusItem
    folder: Path
    first: GaiaState = field(default_factory=GaiaState)

    @property
    def opening(self) -> str:
        attached = f"\nAttached: {self.item.file_name}" if self.item.file_name else ""
        return self.item.question + attached

    async def act(self, state: GaiaState, action: str) -> Change[GaiaState]:
        if (program := program_to_run(action)) is not None:
            if not program.strip():
                raise InvalidAction("a program is needed")
            attached = [self.item.file_name] if self.item.file_name else []
            files = {name: Node(kind="file", content=(self.folder / name).read_bytes()) for name in attached}
            return Change(state=state, text=await printed(program, files, limits=LIMITS, max_chars=MAX_SHOWN_CHARS))
        call = _CALL.fullmatch(action)
        if call is None or not call[2].strip():
            raise InvalidAction("say read(name), calculate(...), python or answer(...)")
        verb, argument = call[1].lower(), call[2].strip()
        if verb == "answer":
            score = float(is_gaia_match(argument, self.item.answer))
            return Change(state=state, text="answered", over=True, score=score)
        if verb == "calculate":
            return Change(state=state, text=calculate(argument))
        return self._read(state, argument)

    def expert(self, state: GaiaState) -> str:
        """Return the file's answer; the file has no solution steps."""
        return f"answer({self.item.answer})"

    def _read(self, state: GaiaState, name: str) -> Change[GaiaState]:
        if name != self.item.file_name:
            raise InvalidAction(f"no file {name}"[:80])
        try:
            text = (self.folder / name).read_bytes().decode()
        except UnicodeDecodeError:
            raise InvalidAction(f"{name} is no text; open it with python") from None
        cut = "\n[cut]" if len(text) > MAX_SHOWN_CHARS else ""
        return Change(state=GaiaState(is_read=True), text=(text[:MAX_SHOWN_CHARS] + cut).strip() or "(empty)")


def make_gaia_env(*, train: str = "", held_out: str = "", level: int = 0) -> Env:
    """Make an environment of GAIA's questions. Raises ValueError if a file or the sandbox is missing.

    `train` and `held_out` are paths of metadata.jsonl or metadata.parquet, in the folder of the attached files; `level`
    is 1 to 3, or 0 for all.
    """
    check_range("level", level, 0, 3)
    require_sandbox()
    worlds = read_files(_playable, train, held_out, level, fetch=FETCH)
    return WorldEnv(
        f"gaia {train} {held_out} level={level}", make_world=lambda task: item_of(task, worlds), rules=RULES
    )


def _playable(path: Path, level: int) -> list[GaiaWorld]:
    """Return the questions of a level. Raises ValueError if an answer or an attached file is missing."""
    _, first = read_rows(path)[0]
    form: type[OpenManusItem] = GaiaItem if "Question" in first else OpenManusItem
    items = [item for item in read_records(path, form) if level in (0, item.level)]
    for item in items:
        if item.answer == UNKNOWN:
            raise ValueError(f"{path} has no answers, like GAIA's test split; use the validation split")
        if not item.file_name:
            continue
        attached = path.parent / item.file_name
        if Path(item.file_name).name != item.file_name or not attached.is_file():
            raise ValueError(f"{path}: the attached file {item.file_name} is not in the same folder; {FETCH}")
        if attached.stat().st_size > MAX_ATTACHMENT_BYTES:
            raise ValueError(
                f"{attached} has more than {MAX_ATTACHMENT_BYTES} bytes; remove its question from {path.name}"
            )
    if not items:
        raise ValueError(f"{path} has no questions of level {level}; use `env.options.level=0` for all levels")
    return [GaiaWorld(item=item, folder=path.parent) for item in items]
