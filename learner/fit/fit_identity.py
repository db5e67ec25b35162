"""What the checkpoints of a fit depend on, recorded so that a run is not continued with something else."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import read_json
from slipstream.learner.batch.examples import Example, Goal
from slipstream.learner.fit.fit_options import FitOptions


def identity_of(goal: Goal, examples: Sequence[Example], options: FitOptions, *, config: Config) -> dict[str, object]:
    """The data and settings that a run's checkpoints depend on."""
    digest = hashlib.sha256()
    for example in examples:
        for side in example:
            for sequence in side:
                digest.update(sequence.tokens.tobytes() + sequence.loss_mask.tobytes())
                if sequence.returns is not None:
                    digest.update(sequence.returns.tobytes())
    identity: dict[str, object] = {
        "goal": goal,
        "model.path": config.model.path,
        "--data": digest.hexdigest(),
        "--epochs": options.epochs,
        "--batch-rows": options.batch_rows,
        "--beta": options.beta,
        "run.seed": config.run.seed,
    }
    lora = config.model.lora
    return identity | ({"model.lora": dataclasses.asdict(lora)} if lora.rank else {})


def check_recorded(path: Path, identity: dict[str, object]) -> None:
    """Raise ConfigError if another identity than `identity` is recorded in `path`."""
    if not path.exists():
        return
    before = read_json(path, dict[str, Any], cure="restore it from a copy, or choose another `run.name`")
    if others := [name for name, value in identity.items() if before.get(name) != value]:
        raise ConfigError(
            f"the run in {path.parent} was started with another {' and '.join(others)}; choose another `run.name`"
        )
