"""Compares the gradient of our loss with TRL's, on one batch of the same weights.

`python -m slipstream.tools.lab.peers.gradients CONFIG FILE`, where `trl_grpo CONFIG MODEL OUT --gradient FILE --changes
'{"max_grad_norm": 0}'` has written the file. The policy that sampled is the one that trains, so all ratios are 1.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.common.config.config import Config, load_config
from slipstream.learner.batch.pack import TokenSequence, micro_batches
from slipstream.learner.loop import Attempt, Policy, batch_of

WAYS = {  # of ours, with the settings in which each differs
    "as TRL": (),
    "without groups of equal returns": ("replay.drop_zero_variance=true",),
}


class Kept(Exception):
    """The gradient has been kept: no step is made."""


def gradient_of(policy: Policy, groups: Sequence[Sequence[Attempt]]) -> dict[str, Tensor]:
    """The gradient of our loss for `groups`; log-probabilities of behaviour are the policy's own."""
    batch, kept = batch_of(groups), dict[str, Tensor]()
    behaved = [replace(sequence, behaviour_logprobs=_logprobs(policy, sequence)) for sequence in batch]

    def keep(*_: object) -> None:
        kept.update({name: weight.grad.clone() for name, weight in policy.model.causal_lm.named_parameters()})
        raise Kept

    hook = policy._optimizer.register_step_pre_hook(keep)
    try:
        policy.step(behaved)
    except Kept:
        policy._optimizer.zero_grad()
    finally:
        hook.remove()
    return kept


@torch.no_grad()
def _logprobs(policy: Policy, sequence: TokenSequence) -> npt.NDArray[np.float32]:
    (packed,) = micro_batches([sequence], max_tokens=sequence.num_tokens, num_ranks=1, rank=0, share_prefixes=False)
    logprobs = torch.zeros(sequence.num_tokens)
    logprobs[packed.loss_positions] = policy.model(packed).logprobs
    return np.asarray(logprobs.numpy())


def compared(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """The cosine of two gradients, and the ratio of their norms."""
    products = torch.zeros(3, dtype=torch.float64)
    for name, gradient in ours.items():
        mine, other = gradient.flatten().double(), theirs[name].flatten().double()
        products += torch.stack([mine @ other, mine @ mine, other @ other])
    dot, mine_square, other_square = products.tolist()
    cosine, norms = dot / math.sqrt(mine_square * other_square), math.sqrt(mine_square / other_square)
    return f"cosine {cosine:.6f}, ratio of norms {norms:.4f}, norms {mine_square**0.5:.4f}, {other_square**0.5:.4f}"


def main(arguments: Sequence[str]) -> None:
    """Print one line for each of WAYS."""
    name, file = arguments
    saved = torch.load(file)
    for way, settings in WAYS.items():
        config = load_config(name, ["optim.max_grad_norm=inf", *settings])
        print(
            f"{way}: {compared(gradient_of(Policy(config), groups_of(saved['episodes'], config)), saved['gradient'])}"
        )


def groups_of(episodes: Sequence[Mapping[str, Any]], config: Config) -> list[list[Attempt]]:
    """The groups that are trained."""
    attempts = [
        Attempt(
            tokens=each["tokens"],
            sampled=each["loss_mask"],
            logprobs=[0.0] * len(each["tokens"]),
            rewards=[each["total_reward"]],
        )
        for each in episodes
    ]
    groups = [list(group) for group in zip(*[iter(attempts)] * config.replay.group_size, strict=True)]
    useful = [group for group in groups if len({attempt.rewards[0] for attempt in group}) > 1]
    return useful if config.replay.drop_zero_variance else groups


if __name__ == "__main__":
    main(sys.argv[1:])
