"""`bfcl`: questions of the Berkeley Function Calling Leaderboard, each answered by calls of the listed functions.

The score is 1 if the calls match by the rule of BFCL's `ast_checker` for Python: each argument has an admissible value
of the declared type. Texts are compared without case, spaces and some punctuation.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import with_tools, written_call
from slipstream.envhub.dataset.checks import immediate
from slipstream.envhub.dataset.dataset import DatasetWorld
from slipstream.envhub.dataset.dataset_row import Item
from slipstream.envhub.dataset.script import Call, Script, calls_in
from slipstream.envhub.env import Env
from slipstream.envhub.user_files import asset_path, item_of, named_files, read_lines
from slipstream.envhub.world import WorldEnv

FETCH = (
    "give a file such as bfcl_eval/data/BFCL_v4_simple_python.json of github.com/ShishirPatil/gorilla's "
    "berkeley-function-call-leaderboard, with the file of the same name in possible_answer beside it"
)
_TYPES = {"string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list, "dict": dict}
_TYPES |= {"any": str}  # in BFCL too
_IGNORED = str.maketrans("'", '"', " ,./-_*^")  # in texts

Options = list[Any]  # the admissible values of an argument; "": it may be left out


class _Row(msgspec.Struct):
    id: str
    question: list[list[Message]] = []  # of each turn
    function: list[dict[str, Any]] = []
    ground_truth: list[dict[str, dict[str, Options]]] = []  # of each call: its name, and the options of its arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A call that a right reply has. Raises KeyError for a function that is not described as for Python."""

    function: Mapping[str, Any]
    options: Mapping[str, Options]

    def is_met(self, call: Call) -> bool:
        """Whether `call` matches, by BFCL's `simple_function_checker`."""
        described, needed = self.function["parameters"], {name for name, its in self.options.items() if "" not in its}
        kinds = {name: _kinds(argument) for name, argument in described["properties"].items()}
        return (
            call.name == self.function["name"]
            and call.arguments.keys() >= needed | set(described["required"])
            and call.arguments.keys() <= kinds.keys() & self.options.keys()
            and all(_is_admissible(value, self.options[name], *kinds[name]) for name, value in call.arguments.items())
        )

    @property
    def written(self) -> str:
        """The call with the first option of each argument that may not be left out."""
        required = self.function["parameters"]["required"]
        given = {
            name: _said(min(its, key=lambda option: option == "", default=""))
            for name, its in self.options.items()
            if "" not in its or name in required
        }
        return written_call({"name": self.function["name"], "arguments": given})


def make_bfcl_env(*, train: str = "", held_out: str = "") -> Env:
    """Make an environment of files of questions, used in turn. Raises ValueError if one is missing or malformed."""
    items = {split: _read(split, path) for split, path in named_files(train, held_out, fetch=FETCH).items()}
    return WorldEnv(
        f"bfcl {train} {held_out}", make_world=lambda task: DatasetWorld(item=item_of(task, items), check=CALLS)
    )


@functools.lru_cache(maxsize=16)  # each episode makes a new environment
def _read(split: str, path: Path) -> list[Item]:
    """Return the file's questions. Raises ValueError for functions that are not described as those of Python."""
    answers = asset_path(split, str(path.parent / "possible_answer" / path.name), fetch=FETCH)
    truths = {truth.id: truth.ground_truth for truth in read_lines(answers, _Row)}
    items = []
    for row in read_lines(path, _Row):
        try:
            functions = {function["name"]: function for function in row.function}
            named = [pair for call in truths[row.id] for pair in call.items()]
            wanted = tuple(Wanted(function=functions[name], options=options) for name, options in named)
            reply = "\n".join(call.written for call in wanted)
            _is_right(reply, wanted)  # raises too
        except KeyError as error:
            raise ValueError(f"{path}, {row.id}: {error} is not known; only calls in Python are scored") from None
        prompt = with_tools([message for turn in row.question for message in turn], row.function)
        items.append(Item(row={}, prompt=prompt, is_chat=True, answer=wanted, solution=reply, script=Script()))
    return items


def _is_right(reply: str, wanted: Sequence[Wanted]) -> bool:
    """Whether each wanted call, in turn, finds one that meets it among the calls left, and none is left over."""
    try:
        left = calls_in(reply)
    except ValueError:
        return False
    for each in wanted:
        met = next((call for call in left if each.is_met(call)), None)
        if met is None:
            return False
        left = [call for call in left if call is not met]
    return not left


CALLS = immediate(lambda reply, wanted: float(_is_right(reply, wanted)))


def _kinds(described: Mapping[str, Any]) -> tuple[Any, Any]:
    """The type of an argument, and of its items if it is a list."""
    kind = _TYPES[described["type"]]
    return kind, _TYPES[described["items"]["type"]] if kind is list else None


def _is_admissible(value: Any, options: Options, kind: Any, inner: Any) -> bool:
    """Whether an argument has its type and is one of the options."""
    type_of_value = float if kind is float and type(value) is int else type(value)
    type_of_options = _type(options)
    if type_of_options not in (kind, None) or type_of_value is not kind:
        # BFCL takes options of another type for the names of variables, which are compared as they are.
        return type_of_value in (kind, type_of_options) and value in options
    if kind is dict:
        return any(_has_fields(value, option) for option in options)
    if kind is list:
        return _is_admissible_list(value, options, inner)
    return _bare(value) in map(_bare, options)


def _is_admissible_list(value: list[Any], options: Options, inner: Any) -> bool:
    """Whether a list is one of the options, and its items have the type `inner` or that of an option's items."""
    lists = [option for option in options if isinstance(option, list)]
    has_other = len(lists) < len(options)  # of these BFCL asks no type
    if not has_other and not any(all(type(each) in (inner, _type(option)) for each in value) for option in lists):
        return False
    lists += [[]] if "" in options else []
    if inner is dict:
        return any(len(value) == len(option) and all(map(_has_fields, value, option)) for option in lists)
    return [*map(_bare, value)] in [[*map(_bare, option)] for option in lists]


def _has_fields(value: Any, option: Any) -> bool:
    """Whether an object has only fields of `option`, with admissible values, and all that may not be left out."""
    return (
        isinstance(value, dict)
        and isinstance(option, dict)
        and {name for name, its in option.items() if "" not in its} <= value.keys() <= option.keys()
        and all(_bare(each) in map(_bare, option[name]) for name, each in value.items())
    )


def _type(options: Options) -> type | None:
    """The type of the first option that is a value."""
    return next((type(option) for option in options if option != ""), None)


def _bare(value: Any) -> Any:
    return value.translate(_IGNORED).lower() if isinstance(value, str) else value


def _said(option: Any) -> Any:
    """An option as a policy would write it, with the first value of each field that may not be left out."""
    if isinstance(option, dict):
        return {name: its[0] for name, its in option.items() if its and "" not in its}
    return [*map(_said, option)] if isinstance(option, list) else option
