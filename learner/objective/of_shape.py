"""Checks what a user's function returned: the right record, with one number of the right kind for each token."""

import dataclasses
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.common.process.config_error import ConfigError

Record = TypeVar("Record")
FLAGS = ("held_back", "masked")  # the fields of `Surrogate` and `Correction` that are not numbers


def of_shape(made: object, kind: type[Record], what: str, *, like: Tensor) -> Record:
    """`made`, if it is a `kind` whose tensors have the shape, the dtype and the device of `like`. No wait for a GPU.

    Raises ConfigError otherwise; `what` names the function.
    """
    if not isinstance(made, kind):
        raise ConfigError(f"{what} must return a {kind.__module__}.{kind.__name__}, got a {type(made).__name__}")
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = getattr(made, item.name)
        dtype = torch.bool if item.name in FLAGS else like.dtype
        expected = f"a tensor {tuple(like.shape)} of {dtype} on {like.device}"
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            found = f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
        if found != expected:
            raise ConfigError(f"{what} must return `{item.name}` as {expected}, got {found}")
    return made
