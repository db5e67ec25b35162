"""Compiles each layer of a model with torch.compile: same results up to rounding, with fewer passes over memory.

Layers of the same shape share compiled code, which works for packs of any length. Attention is not compiled (see
`slipstream.learner.model.attention`), so the code of a layer has two parts: before and after the attention.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from slipstream.common.process.config_error import ConfigError

BACKEND = "inductor"


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Make each layer compile its forward and backward pass at the first call."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)


def check_compiler(device: torch.device) -> None:
    """Compile one line of code for `device`. Raises ConfigError if that fails."""
    doubled = torch.compile(lambda numbers: 2 * numbers, backend=BACKEND)
    try:
        doubled(torch.ones(2, device=device))
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {inner}".splitlines()[0]
        raise ConfigError(
            f"`learner.compile` must be false if torch.compile does not work, got True ({reason}); install a C++ "
            "compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev), or set the environment "
            "variable CXX to a compiler"
        ) from error
