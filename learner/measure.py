"""What is asked of the models before the advantages are made: forward passes over the whole batch, without gradient.

Each rank asks about its own packs, and hears from the others: every rank ends with the same numbers for every token, so
that all that is made of them, down to a mean over the batch, is the same everywhere without another word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from common.objective_config import ObjectiveConfig
from learner.model.critic import Critic
from learner.model.packed_model import PackedModel
from learner.pack import Packed, TokenSequence, bins_of_rank, pack
from learner.ranks import Ranks
from learner.model.value_model import ValueHead

Numbers = Float[np.ndarray, " tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A number for each loss token of a batch, one sequence after the other; None where the objective does not ask."""

    values: Numbers | None = None  # the critic's, in the unit of the reward
    reference_logprobs: Numbers | None = None
    current_logprobs: Numbers | None = None


def measure(
    sequences: Sequence[TokenSequence],
    *,
    model: PackedModel,
    critic: Critic | None,
    reference: PackedModel | None,
    ranks: Ranks,
    objective: ObjectiveConfig,
    temperature: float,
    micro_batch_tokens: int,
    chunk_tokens: int,
) -> Measured:
    """Ask what `objective` needs to know of `sequences`, which every rank passes whole and in the same order.

    Every rank calls it: each forward pass is collective, and so is the exchange at the end.
    """

    def logprobs(of: PackedModel) -> Callable[[Packed], Tensor]:
        return lambda packed: of(packed, temperature=temperature, chunk_tokens=chunk_tokens).logprobs

    asked: dict[str, Callable[[Packed], Tensor]] = {}
    if critic is not None and isinstance(critic.module, ValueHead):
        asked["values"] = lambda packed: model(packed, temperature=temperature, chunk_tokens=chunk_tokens).values
    elif critic is not None:
        asked["values"] = critic.module
    if reference is not None and objective.kl_place == "reward":
        asked["reference_logprobs"] = logprobs(reference)
    if objective.advantage == "vtrace":
        asked["current_logprobs"] = logprobs(model)
    if not asked:
        return Measured()
    found = of_each_token(asked, sequences, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
    if critic is not None:
        found["values"] = critic.scale.restored(found["values"])
    return Measured(**found)


@torch.no_grad()
def of_each_token(
    asked: Mapping[str, Callable[[Packed], Tensor]],
    sequences: Sequence[TokenSequence],
    *,
    micro_batch_tokens: int,
    ranks: Ranks,
) -> dict[str, Numbers]:
    """Every answer at its loss token, on every rank. A token is in one pack of one rank, so that the sum is exact."""
    stops = np.cumsum([sequence.loss_mask.sum() for sequence in sequences])
    starts = np.concatenate([[0], stops[:-1]])
    answers = torch.zeros((len(asked), int(stops[-1])), dtype=torch.float64, device=ranks.device)
    for members in bins_of_rank(
        sequences, max_tokens=micro_batch_tokens, num_ranks=ranks.num_ranks, rank=ranks.rank
    ):  # fmt: skip
        packed = pack([sequences[index] for index in members]).to(ranks.device)
        places = [np.arange(starts[index], stops[index]) for index in members]
        where = torch.from_numpy(np.concatenate([np.arange(0), *places])).to(ranks.device)
        for answer, ask in zip(answers, asked.values(), strict=True):
            answer[where] = ask(packed).double()
    dist.all_reduce(answers)
    return dict(zip(asked, answers.cpu().numpy(), strict=True))
