"""Measures how far the gradients of different tasks agree, from the last steps of a run's archive.

    python -m slipstream.tools.lab.study.task_gradients runs/quickstart --steps 10

Every group is split into two halves of equal size, and the gradient of each half is taken at the trained weights, with
returns centred within the half. The halves share no episode, so the mean product of two halves is the squared signal:
of one task, what its attempts agree on; of different tasks, what all tasks agree on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.common.config.config import load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory
from slipstream.replay.run.archive import Archive


def gradient(model: PreTrainedModel, trajectory: Trajectory) -> Float[torch.Tensor, " weights"]:
    """The gradient of the log-probability of what the policy sampled, by all weights."""
    tokens = torch.from_numpy(trajectory.token_array().astype(np.int64))
    sampled = torch.from_numpy(trajectory.loss_mask_array().copy())[1:]
    logprobs = torch.log_softmax(model(tokens[None], use_cache=False).logits[0, :-1], dim=-1)
    chosen = (logprobs.gather(1, tokens[1:, None])[:, 0] * sampled).sum()
    return torch.cat([each.flatten() for each in torch.autograd.grad(chosen, list(model.parameters()))])


class Halves(NamedTuple):
    """The gradients of two random halves of a group, and the sum of the squared advantages of each."""

    gradients: Float[torch.Tensor, "2 weights"]
    energies: Float[torch.Tensor, " 2"]


def halves(model: PreTrainedModel, members: Sequence[Trajectory], dice: np.random.Generator) -> Halves:
    """The halves of a group."""
    gradients, energies = [], []
    for half in np.array_split(dice.permutation(len(members)), 2):
        returns = torch.tensor([members[member].total_reward for member in half])
        advantages = returns - returns.mean()
        gradients.append(advantages @ torch.stack([gradient(model, members[member]) for member in half]))
        energies.append((advantages**2).sum())
    return Halves(torch.stack(gradients), torch.stack(energies))


def own_share(halves_of_groups: Sequence[Halves], *, product: float) -> float:
    """`own` of tools/lab/study/screen.py, where `product` is that of the halves of one task.

    In its terms a half's gradient has the mean product T A A' with the other half and the mean square T A^2 + W A.
    """
    energies = torch.stack([each.energies for each in halves_of_groups])
    squares = torch.stack([(each.gradients**2).sum(dim=1) for each in halves_of_groups])
    own = product / float(energies.prod(dim=1).mean())
    noise = (float(squares.mean()) - own * float((energies**2).mean())) / float(energies.mean())
    return own / noise


def main(arguments: Sequence[str]) -> None:
    """Print the squared size of a half's gradient, and the mean products of halves."""
    parser = argparse.ArgumentParser(prog="task_gradients", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run that keeps an archive")
    parser.add_argument("--steps", type=int, default=10, help="how many of the last steps")
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run.parent, options.run.name)
    config = load_config(str(run_dir.config), [])
    model = AutoModelForCausalLM.from_pretrained(run_dir.trained_model, trust_remote_code=False).float()
    archive, dice = Archive(run_dir.trajectories, config.run.name), np.random.default_rng(0)
    limit = config.replay.group_size * config.replay.max_trajectory_bytes
    found = [
        halves(model, group.trajectories, dice)
        for step in archive.steps[-options.steps :]
        for group in archive.read(step, vocab_size=1 << 30, max_group_bytes=limit).groups
        if all(len(member.branch_starts) == 1 for member in group.trajectories)
    ]
    gradients, num = torch.stack([each.gradients for each in found]), len(found)
    tasks, products = gradients.sum(dim=1), (gradients[:, 0] * gradients[:, 1]).sum(dim=1)
    same, error = float(products.mean()), float(products.std()) / num**0.5
    apart = float(((tasks.sum(dim=0) ** 2).sum() - (tasks**2).sum()) / (4 * num * (num - 1)))
    own = [own_share(found, product=product) for product in (same - error, same, same + error)]
    print(f"{num} groups; the squared gradient of a half is {float((gradients**2).sum(dim=2).mean()):.4g} on average")
    print(f"product of the halves of one task: {same:.4g} +- {error:.2g}; of halves of different tasks: {apart:.4g}")
    print(f"own: {own[1]:.2f}, between {own[0]:.2f} and {own[2]:.2f} with one standard error")


if __name__ == "__main__":
    main(sys.argv[1:])
