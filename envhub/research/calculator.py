"""A calculator that is safe for untrusted input: it accepts numbers, + - * / and brackets, and nothing else."""

import ast
import operator
import re
from collections.abc import Callable

from slipstream.envhub.world import InvalidAction

MAX_EXPRESSION_CHARS = 200

_SIGNS = re.compile(r"[-+*/.()\d\s]+", re.ASCII)
_POINT = re.compile(r"\s*\.\s*")  # a word-level tokenizer writes 1 . 5
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Return the value of `expression`, to ten decimal places: "7 / 2" gives "3.5", "6 / 2" gives "3".

    Raises InvalidAction, with the reason, for a malformed expression and for one without a value, such as 1 / 0.
    """
    if len(expression) > MAX_EXPRESSION_CHARS or _SIGNS.fullmatch(expression) is None:
        raise InvalidAction(
            f"an expression has at most {MAX_EXPRESSION_CHARS} characters: numbers, + - * / and brackets"
        )
    try:
        value = _value(ast.parse(_POINT.sub(".", expression).strip(), mode="eval").body)
        return str(int(value)) if value == int(value) else str(round(value, 10))
    except (SyntaxError, RecursionError, MemoryError):
        raise InvalidAction("not a valid expression") from None
    except ArithmeticError as error:
        raise InvalidAction(str(error)) from None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise InvalidAction("only + - * / are supported")
