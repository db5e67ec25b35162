"""What both sides of a comparison of fits are given. It imports nothing that only one side has."""

from pathlib import Path
from typing import Any

import msgspec


class FitPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fit: model, rows and settings."""

    goal: str  # sft, dpo or reward
    seed: int
    model: str  # the folder of the model that both sides begin with
    head: str  # a file with the score head for the first gradient of a reward model
    rows: list[dict[str, Any]]  # in TRL's conversational format with `prompt`
    held_out: list[dict[str, Any]]
    order: list[int]  # places of `rows`, batch after batch, over all epochs
    out: str  # the folder of TRL's results
    lr: float
    batch_rows: int
    max_tokens: int
    max_grad_norm: float
    betas: tuple[float, float]
    eps: float
    beta: float  # of DPO

    @property
    def ordered_rows(self) -> list[dict[str, Any]]:
        return [self.rows[place] for place in self.order]

    @classmethod
    def read(cls, path: Path) -> "FitPlan":
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))
