"""torch.compile of a model's layers, each by itself: the same numbers but for rounding, in fewer passes over memory.

Layers of one shape share their code, and its lengths are symbols: packs of other lengths use it too. Attention is not
compiled, see `learner.attention`: a layer's code is what comes before it and what comes after.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from common.config_error import ConfigError

BACKEND = "inductor"


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Have each layer's forward and backward passes compiled when they are first called for."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)


def check_compiler(device: torch.device) -> None:
    """Compile one line for `device`. Raises ConfigError where that cannot be done."""
    doubled = torch.compile(lambda numbers: 2 * numbers, backend=BACKEND)
    try:
        doubled(torch.ones(2, device=device))
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        reason = f"{type(inner).__name__}: {inner}".splitlines()[0]
        raise ConfigError(
            f"`learner.compile` must be false where torch.compile does not work, got True ({reason}); install a C++ "
            "compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev), or name a compiler in "
            "the environment's CXX"
        ) from error
