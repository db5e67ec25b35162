"""Bounds what a chat template may multiply: a large product holds the interpreter, so that no time limit acts."""

from collections.abc import Sized
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

MAX_SIZE = 1 << 20  # bits of a number, or items of a text or list


def bound_products() -> None:
    """Make Jinja's sandboxes in this process, in which transformers renders, refuse products above MAX_SIZE.

    They raise OverflowError. A template that was compiled before is not affected.
    """
    SandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
    SandboxedEnvironment.default_binop_table |= {"*": _product, "**": _power}


def _product(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        _check(one.bit_length() + other.bit_length())
    elif isinstance(one, Sized) and isinstance(other, int):
        _check(len(one) * other)
    elif isinstance(one, int) and isinstance(other, Sized):
        _check(one * len(other))
    return one * other


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        _check(base.bit_length() * exponent)
    return base**exponent


def _check(size: int) -> None:
    if size > MAX_SIZE:
        raise OverflowError(f"it makes a product of more than {MAX_SIZE} bits or characters")
