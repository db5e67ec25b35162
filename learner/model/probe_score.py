"""Scores the probe of a version with the weights to be published: see `slipstream.common.transfer.probe`."""

import numpy as np
import torch

from slipstream.common.transfer.probe import MAX_PROBE_TOKENS, TOLERANCES, Probe
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.packed_model import PackedModel

_SEED = 20


@torch.no_grad()
def probe_of(model: PackedModel, device: torch.device) -> Probe:
    """One forward pass over at most MAX_PROBE_TOKENS random tokens. Collective.

    The tokens are the same for every version, so that the scores of one can be compared with those of the next.
    """
    room = (model.settings.max_tokens or MAX_PROBE_TOKENS + 1) - 1  # an engine's prompt leaves room for one token
    known = np.arange(model.vocab_size, dtype=np.int32)
    if model.absent is not None:
        known = np.delete(known, model.absent.cpu().numpy())
    tokens = np.random.default_rng(_SEED).choice(known, min(room, MAX_PROBE_TOKENS))
    sequence = TokenSequence.bare(tokens, np.arange(len(tokens)) > 0)
    with model.at_temperature(1.0):
        logprobs = model(pack([sequence]).to(device)).logprobs
    return Probe(tokens=tokens.tolist(), logprobs=logprobs.tolist(), tolerance=TOLERANCES[model.settings.dtype])
