"""The settings of learning from recorded conversations: `slipstream sft`, `dpo` and `reward`."""

import math
from dataclasses import dataclass

from common.config_error import require


@dataclass(kw_only=True, slots=True)
class FitConfig:
    data: str = ""  # a .jsonl or .parquet of `slipstream collect` or `replay export`, or in TRL's formats
    epochs: int = 1  # passes over the rows
    batch_rows: int = 32  # conversations, or pairs of them, in one optimizer step
    held_out: float = 0.05  # share of the groups that is not trained on but measured, before and after each epoch
    min_return: float = -math.inf  # sft: rows that earned less are left out, which makes it rejection sampling
    best_of_group: int = 0  # sft: so many rows of a group at most, those that earned most; 0 takes all
    beta: float = 0.1  # dpo: what a difference in log-probability counts; small lets the policy move far

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "fit.epochs", ">= 1", self.epochs, "1 is one pass")
        require(self.batch_rows >= 1, "fit.batch_rows", ">= 1", self.batch_rows, "try 32")
        require(0 <= self.held_out < 1, "fit.held_out", "in [0, 1)", self.held_out, "0 measures nothing")
        require(not math.isnan(self.min_return), "fit.min_return", "a number", self.min_return, "leave it out for all")
        require(self.best_of_group >= 0, "fit.best_of_group", ">= 0", self.best_of_group, "0 takes all")
        require(math.isfinite(self.beta) and self.beta > 0, "fit.beta", "> 0", self.beta, "0.1 is usual")
