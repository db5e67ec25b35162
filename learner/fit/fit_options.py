"""The options of `slipstream fit sft`, `dpo`, `reward` and `prm`."""

import math
from dataclasses import dataclass

from slipstream.common.config.setting_bounds import Count, Positive, ShareBelow1, Whole, check_bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    data: str = ""  # a .jsonl, .json or .parquet file, or hub:NAME:SPLIT, with rows in a shape of docs/data.md
    epochs: Count = 1  # passes over the rows
    batch_rows: Count = 32  # conversations, or pairs of conversations, in one optimizer step
    held_out: ShareBelow1 = 0.05  # fraction of the groups that is only measured, before the first and after each epoch
    min_return: float = -math.inf  # sft: rows with a lower return are left out (rejection sampling)
    best_of_group: Whole = 0  # sft: the most rows of a group, those with the highest return; 0 takes all
    beta: Positive = 0.1  # dpo: scale of a difference in log-probability; a small one lets the policy move far

    def __post_init__(self) -> None:
        check_bounds(self, "--")
