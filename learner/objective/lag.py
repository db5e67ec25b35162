"""Metrics of loss tokens by lag: sums of each bucket of lag in, metrics of a step out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BUCKETS = ("0", "1", "2", "3_4", "5_8", "9_16", "17_32", "33_up")
_LARGEST = (0, 1, 2, 4, 8, 16, 32)  # lag in each bucket but the last


@dataclass(frozen=True, kw_only=True, slots=True)
class LagMetrics:
    """Metrics of the loss tokens in one bucket of lag, over all ranks."""

    fraction: float  # of all loss tokens
    ratio_mean: float
    effective_sample_size: float  # as a fraction of the bucket's tokens
    clip_fraction: float  # of the bucket's tokens: clipped by the surrogate
    masked_fraction: float  # of the bucket's tokens: masked


def bucket_of(lag: int) -> str:
    """The name of the bucket of `lag`.

    >>> bucket_of(2), bucket_of(3), bucket_of(33)
    ('2', '3_4', '33_up')
    """
    return BUCKETS[sum(lag > largest for largest in _LARGEST)]


def by_lag(
    lags: Int[Tensor, " tokens"],
    lagged_ratio: Float[Tensor, " tokens"],
    *,
    clipped: Bool[Tensor, " tokens"],
    masked: Bool[Tensor, " tokens"],
) -> Float[Tensor, "buckets sums"]:
    """One row per bucket: the number of tokens, and the sums of ratio, ratio^2, clipped and masked over them.

    Lags 0, 3, 4 of ratios 1, 2, 3, the last of them masked, give rows (1, 1, 1, 0, 0), 0, 0, (2, 5, 13, 0, 1), 0, ...
    """
    ones = torch.ones_like(lagged_ratio)
    summed = torch.stack([ones, lagged_ratio, lagged_ratio.square(), clipped.to(ones), masked.to(ones)], dim=1)
    bucket = torch.bucketize(lags, torch.tensor(_LARGEST, device=lags.device))
    return ones.new_zeros((len(BUCKETS), summed.shape[1])).index_add(0, bucket, summed)


def lag_metrics(sums: Sequence[Sequence[float]]) -> dict[str, LagMetrics]:
    """The metrics of each bucket with tokens, from the sums of `by_lag` over a whole batch.

        effective_sample_size = mean(ratio)^2 / mean(ratio^2)

    Ratios 2 and 3: 2.5^2 / 6.5 = 0.96.
    """
    num_tokens = sum(row[0] for row in sums)
    return {
        bucket: LagMetrics(
            fraction=count / num_tokens,
            ratio_mean=ratio_sum / count,
            effective_sample_size=ratio_sum**2 / (ratio_square_sum * count),
            clip_fraction=num_clipped / count,
            masked_fraction=num_masked / count,
        )
        for bucket, (count, ratio_sum, ratio_square_sum, num_clipped, num_masked) in zip(BUCKETS, sums, strict=True)
        if count
    }
