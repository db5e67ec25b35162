"""Sends a run to Weights & Biases. `wandb` reads WANDB_API_KEY, WANDB_MODE=offline and the like itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import Sample


class WandbTracker:
    """One run of W&B, whose x-axis is the optimizer step."""

    def __init__(self, name: str, *, folder: Path, project: str, settings: Mapping[str, Any], run: str) -> None:
        """Begin a run called `name`, or continue `run`. Raises ConfigError."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("`--to wandb` needs the package wandb; install it: pip install wandb") from error
        try:
            self._run = wandb.init(
                project=project, name=name, id=run or None, resume="allow", dir=str(folder), config=dict(settings)
            )
        except wandb.Error as error:
            raise ConfigError(f"W&B refused the run: {error}; run `wandb login`, or set WANDB_MODE=offline") from error
        # A step that a resumed learner makes again is logged again, so W&B's own counter cannot be the step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.place = str(self._run.url or self._run.dir)  # without a link where WANDB_MODE=offline
        self.run = str(self._run.id)

    def log(self, record: Mapping[str, float]) -> None:
        self._run.log(dict(record))

    def log_samples(self, samples: Sequence[Sample]) -> None:
        import wandb

        rows = [msgspec.to_builtins(sample) for sample in samples]
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"step": samples[0].step, "samples": table})

    def close(self) -> None:
        self._run.finish()
