"""A cell of a study that begins with the quickstart's first weights of its seed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from slipstream.common.config.config import Config, load_config
from slipstream.tools.lab.study.cells import ranks
from slipstream.tools.lab.study.run import warm_start
from slipstream.tools.lab.study.task import TASK


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmCell(ABC):
    """One run, and the place of its files."""

    seed: int
    folder: Path
    settings: tuple[str, ...]  # `a.b=c` that all cells share

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the run and its result."""

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def warm_name(self) -> str:
        return f"warm-seed{self.seed}"

    def warm_config(self) -> Config:
        """The run that makes the first weights of all cells of this seed."""
        return self._loaded(self.warm_name)

    def trained_with(self, *settings: str) -> Config:
        """The cell's own run, which begins with those weights."""
        model = f"model.path={self.folder / self.warm_name / 'trained_model'}"
        return self._loaded(self.name, model, *settings)

    def _loaded(self, name: str, *settings: str) -> Config:
        own = (f"run.name={name}", f"run.root={self.folder}", f"run.seed={self.seed}")
        return load_config(TASK, ["eval.num_tasks=400", *self.settings, *settings, *own])


def make_warm(cell: WarmCell) -> None:
    """Make the first weights of the cell's seed, in a worker process."""
    warm_start(cell.warm_config(), ranks=ranks())
