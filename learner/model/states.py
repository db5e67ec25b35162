"""Layers that carry a state from token to token: they take each sequence of a pack alone.

Linear attention, state space models and short convolutions would continue into the next sequence. Such a layer gets the
pack as small batches instead: sequences of similar length that follow one another are its rows. The padding of a row
comes after its tokens, and the layer is causal, so no token sees it. Every other layer works on the packed row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.learner.model.attention import CannotPack, PackRows

Forward = Callable[..., object]
# What the attention needs to know about the pack; to a kernel of such a layer it would mean that the batch is a pack.
_OF_THE_PACK = {"rows", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


@dataclass(kw_only=True, slots=True)
class _Present:
    """The rows of the pack that passes through the layers now; None outside of a forward pass of packed sequences."""

    rows: PackRows | None = None


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder, which compile, recompute and shard one by one."""
    unsplit = set(causal_lm._no_split_modules or [])
    # FSDP makes a module one of a subclass, with another name.
    return [module for module in causal_lm.modules() if unsplit & {kind.__name__ for kind in type(module).__mro__}]


def stateful_parts(layer: nn.Module) -> list[nn.Module]:
    """The parts of a decoder layer that carry a state: those with a convolution, as all that transformers has."""
    return [part for part in layer.modules() if any(isinstance(child, nn.Conv1d) for child in part.children())]


def stateful_kinds(causal_lm: PreTrainedModel) -> list[str]:
    """The class of each part that carries a state, in the order of the layers; empty for most models."""
    return [type(part).__name__ for layer in decoder_layers(causal_lm) for part in stateful_parts(layer)]


def num_attending(causal_lm: PreTrainedModel) -> int:
    """The number of layers in which a token attends to all those before it."""
    without = [
        layer
        for layer in decoder_layers(causal_lm)
        if stateful_parts(layer) and not any("is_causal" in vars(module) for module in layer.modules())
    ]
    # Some architectures name the part as well as its layer, and so count twice.
    return max(0, int(causal_lm.config.get_text_config().num_hidden_layers) - len(without))


def separate_states(causal_lm: PreTrainedModel) -> None:
    """Let the layers that carry a state begin again with each sequence of a pack, whose `rows` the layers receive.

    Without `rows` they compute what they did before. Call it before anything else wraps a layer's forward pass: each
    layer notes the rows when it is called, also when it is recomputed in the backward pass.
    """
    present = _Present()
    for layer in decoder_layers(causal_lm):
        parts = stateful_parts(layer)
        for part in parts:
            part.forward = partial(_by_sequence, part.forward, present)
        if parts:
            layer.forward = partial(_with_rows, layer.forward, present)


def _with_rows(forward: Forward, present: _Present, *inputs: object, **named: object) -> object:
    """Call a layer's own `forward` while `present` has the rows of the pack."""
    rows = named.get("rows")
    assert rows is None or isinstance(rows, PackRows)
    present.rows = rows
    try:
        return forward(*inputs, **named)
    finally:
        present.rows = None


@torch.compiler.disable(reason="it splits each pack at different places")  # type: ignore[no-untyped-call, untyped-decorator]
def _by_sequence(
    forward: Forward, present: _Present, hidden_states: Float[Tensor, "batch tokens hidden"], **named: object
) -> object:
    """What `forward`, a part that carries a state, makes of each sequence of the pack alone."""
    if present.rows is None:
        return forward(hidden_states, **named)
    if present.rows.shared is not None:
        raise CannotPack("its layers carry a state from token to token, and cannot continue that of a shared prefix")
    others = {name: value for name, value in named.items() if name not in _OF_THE_PACK}
    if tensors := sorted(name for name, value in others.items() if isinstance(value, Tensor)):
        raise CannotPack(f"its layers that carry a state need {', '.join(tensors)} besides the hidden states")
    rows = present.rows.rows
    parts = torch.split_with_sizes(hidden_states[0], [row.num_tokens for row in rows])
    of_rows = []
    for part, row in zip(parts, rows, strict=True):
        mixed = forward(row.padded(part), **others)
        if not isinstance(mixed, Tensor):
            raise CannotPack(f"its layers that carry a state return a {type(mixed).__name__} instead of hidden states")
        of_rows.append(row.unpadded(mixed))
    return torch.cat(of_rows)[None]
