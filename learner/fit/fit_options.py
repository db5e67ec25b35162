"""The options of `slipstream sft`, `dpo`, `reward` and `prm`."""

import math
from dataclasses import dataclass

from slipstream.common.process.config_error import require


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    data: str = ""  # a .jsonl or .parquet file of `slipstream collect` or `replay export`, or in a format of TRL
    epochs: int = 1  # passes over the rows
    batch_rows: int = 32  # conversations, or pairs of conversations, in one optimizer step
    held_out: float = 0.05  # fraction of the groups that is only measured, before the first and after each epoch
    min_return: float = -math.inf  # sft: rows with a lower return are left out (rejection sampling)
    best_of_group: int = 0  # sft: the most rows of a group, those with the highest return; 0 takes all
    hard: bool = False  # prm: every label above 0 counts as 1, so that one completion that succeeded is enough
    beta: float = 0.1  # dpo: scale of a difference in log-probability; a small one lets the policy move far

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "--epochs", ">= 1", self.epochs, "1 is one pass")
        require(self.batch_rows >= 1, "--batch-rows", ">= 1", self.batch_rows, "try 32")
        require(0 <= self.held_out < 1, "--held-out", "in [0, 1)", self.held_out, "0 holds nothing out")
        require(
            not math.isnan(self.min_return),
            "--min-return",
            "a number",
            self.min_return,
            "leave it out to take all rows",
        )
        require(self.best_of_group >= 0, "--best-of-group", ">= 0", self.best_of_group, "0 takes all")
        require(math.isfinite(self.beta) and self.beta > 0, "--beta", "> 0", self.beta, "0.1 is usual")
