"""Draws a bug for a function: one operator, number or name in its body is replaced by a plausible other one."""

import ast
import random
from dataclasses import dataclass

from slipstream.envhub.task_seed import split_of

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {  # kind of node -> (the operator, its replacement)
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_NAMES = {"min": "max", "max": "min", "lower": "upper", "upper": "lower"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    line: int  # counted from 1
    right: str
    wrong: str


def draw_bug(rng: random.Random, source: str, *, split: str) -> Bug | None:
    """Return a bug of `split` for `source`, the source of one function; None if no mutation of it is in `split`."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    lines = source.splitlines()
    bugs = [
        Bug(line=number, right=lines[number - 1], wrong=wrong)
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.expr | ast.AugAssign) and (number := node.lineno) == node.end_lineno
        for wrong in _mutations(node, lines[number - 1])
        if split_of(f"{function.name} {wrong.strip()}") == split
    ]
    return rng.choice(bugs) if bugs else None


def _mutations(node: ast.expr | ast.AugAssign, line: str) -> list[str]:
    """Return copies of the line of `node`, each with a different replacement of `node`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _with_other_operator(line, node.left, node.ops[0], node.comparators[0])
    if isinstance(node, ast.BinOp):
        return _with_other_operator(line, node.left, node.op, node.right)
    if isinstance(node, ast.AugAssign):
        return _with_other_operator(line, node.target, node.op, node.value)
    if isinstance(node, ast.BoolOp):
        return _with_other_operator(line, node.values[0], node.op, node.values[1])
    if isinstance(node, ast.Constant) and type(node.value) is int:
        others = [str(node.value + 1)] + ([str(node.value - 1)] if node.value else [])
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        others = [_NAMES[node.id]]
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        others = [f"{ast.unparse(node.value)}.{_NAMES[node.attr]}"]
    else:
        others = []
    return [line[: node.col_offset] + other + line[node.end_col_offset :] for other in others]


def _with_other_operator(line: str, left: ast.expr, operator: ast.AST, right: ast.expr) -> list[str]:
    """Return the line with another operator between `left` and `right`; brackets and spaces between them stay."""
    if type(operator) not in _OPERATORS:
        return []
    old, new = _OPERATORS[type(operator)]
    start, end = left.end_col_offset, right.col_offset
    assert start is not None
    return [line[:start] + line[start:end].replace(old, new, 1) + line[end:]]
