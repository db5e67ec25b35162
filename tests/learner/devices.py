"""A device beside the CPU: what both compute is compared."""

import dataclasses

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from slipstream.learner.ranks.ranks import Ranks


def on_cpu(ranks: Ranks) -> Ranks:
    """The same rank, on the CPU, in the same process."""
    if ranks.device.type == "cpu":
        return ranks
    return dataclasses.replace(ranks, device=torch.device("cpu"), mesh=init_device_mesh("cpu", (1,)))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root of the mean squared error, as a fraction of that of the numbers."""
    found, exact = (each.detach().cpu().double() for each in (found, exact))
    return float((found - exact).norm() / exact.norm())
