"""Micro-batches with as many tokens as a configuration allows, every token but the first of each sequence trained."""

import numpy as np

from slipstream.common.config.config import Config
from slipstream.learner.batch.pack import Packed, TokenSequence, pack
from slipstream.learner.ranks.context import Context


def full_pack(config: Config, context: Context | None = None) -> Packed:
    """As many sequences of `model.max_tokens` as fit into a micro-batch, and a shorter one for the rest."""
    longest, num_tokens = config.model.max_tokens, config.learner.micro_batch_tokens
    lengths = [longest] * (num_tokens // longest)
    if rest := num_tokens % longest:
        lengths.append(rest)
    return pack([made_sequence(length, config) for length in lengths], context=context)


def made_sequence(length: int, config: Config) -> TokenSequence:
    """A sequence of `length` equal tokens, every one but the first trained."""
    ones = np.ones(length, dtype=np.float32)
    has_critic = config.objective.critic != "none"
    return TokenSequence(
        tokens=np.ones(length, dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        behaviour_logprobs=-ones,
        advantages=ones,
        old_values=ones if has_critic else None,
        returns=ones if has_critic else None,
        trajectory_tokens=length - 1,
        lags=np.zeros(length, dtype=np.int32),
        kept=None,
    )
