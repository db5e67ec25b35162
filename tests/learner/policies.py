"""Log-probabilities for tests of the objective: hand-picked ones, drawn ones, and a derivative by differences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.objective.loss_tokens import LossTokens
from slipstream.learner.objective.ratio import Sequences


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A batch of loss tokens in float64."""

    current: Tensor
    behaviour: Tensor
    advantages: Tensor
    sequences: Sequences

    @property
    def members(self) -> list[list[int]]:
        """The tokens of each sequence that has any."""
        ids = self.sequences.ids.tolist()
        return [[i for i, other in enumerate(ids) if other == each] for each in sorted(set(ids))]

    def read(self, current: Tensor | None = None, **others: Tensor | None) -> LossTokens:
        """What the loss reads, perhaps with other log-probabilities of the current policy."""
        current = self.current if current is None else current
        return loss_tokens(current, self.behaviour, self.advantages, sequences=self.sequences, **others)


_LOGPROB = st.floats(-6, -1e-3)


@st.composite
def batches(draw: st.DrawFn) -> Tokens:
    """Up to five sequences of up to six tokens, of which some have none."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    num_tokens = sum(lengths)

    def column(values: st.SearchStrategy[float]) -> Tensor:
        return torch.tensor(draw(st.lists(values, min_size=num_tokens, max_size=num_tokens)), dtype=torch.float64)

    return Tokens(
        current=column(_LOGPROB),
        behaviour=column(_LOGPROB),
        # Smaller ones would cost weights their digits.
        advantages=column(st.floats(-3, 3).map(lambda a: a if abs(a) > 1e-100 else 0.0)),
        sequences=of_lengths(*lengths),
    )


def any_batch(test: Callable[[Tokens], None]) -> Callable[[], None]:
    """Run `test` on 40 drawn batches; the machine may be busy, so no single one has a deadline."""
    return settings(max_examples=40)(given(batches())(test))


def loss_tokens(
    current: Tensor, behaviour: Tensor, advantages: Tensor, *, sequences: Sequences, **others: Tensor | None
) -> LossTokens:
    """What the loss reads; without lag, and with entropies of 0 unless `others` has them."""
    columns = {"entropies": torch.zeros_like(advantages), "lags": torch.zeros_like(sequences.ids)} | others
    return LossTokens(
        current_logprobs=current, behaviour_logprobs=behaviour, advantages=advantages, sequences=sequences, **columns
    )


def of_lengths(*lengths: int) -> Sequences:
    """Sequences of so many loss tokens each, of which each is a whole trajectory."""
    numbers, num_tokens = torch.arange(len(lengths)), torch.tensor(lengths)
    return Sequences(
        ids=numbers.repeat_interleave(num_tokens), num=len(lengths), trajectories=numbers, trajectory_tokens=num_tokens
    )


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slopes(loss_of: Callable[[Tensor], Tensor], at: Tensor, *, width: float = 1e-6) -> list[float]:
    """The derivative of the summed loss with respect to each element of `at`, by central differences."""
    found = []
    for index in range(len(at)):
        step = torch.zeros_like(at)
        step[index] = width
        found.append(float((loss_of(at + step).sum() - loss_of(at - step).sum()) / (2 * width)))
    return found


def gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> list[float]:
    """The same by autograd."""
    leaf = at.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(leaf).sum(), leaf)
    return [float(each) for each in found]
