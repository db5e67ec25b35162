"""Sends a run to MLflow. `mlflow` reads MLFLOW_TRACKING_URI and its credentials itself."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.common.process.config_error import ConfigError, reason
from slipstream.common.process.metrics import Sample

MAX_PARAM_CHARS = 6000  # the longest value of a parameter that MLflow stores

log = logging.getLogger(__name__)


class MlflowTracker:
    """One run of an MLflow experiment."""

    def __init__(self, name: str, *, folder: Path, project: str, settings: Mapping[str, Any], run: str) -> None:
        """Begin a run called `name`, or continue `run`. Raises ConfigError."""
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                "`--to mlflow` needs the package mlflow; install it: pip install mlflow-skinny"
            ) from error
        server = mlflow.get_tracking_uri()
        try:
            self._client = mlflow.MlflowClient()
            experiment = self._client.get_experiment_by_name(project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(project)
            found = self._client.get_run(run) if run else self._client.create_run(number, run_name=name)
            self.run = str(found.info.run_id)
            for key, value in {} if run else settings.items():
                self._client.log_param(self.run, key, str(value)[:MAX_PARAM_CHARS])
        except (mlflow.MlflowException, OSError) as error:  # of a server, or of a store in files
            raise ConfigError(
                f"MLflow refused the run: {reason(error)}; does MLFLOW_TRACKING_URI name its server, or a store that "
                "it can write, such as sqlite:///mlflow.db?"
            ) from error
        self.place = f"{server}, run {self.run}"

    def log(self, record: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        step, when_ms = int(record["step"]), int(1000 * record["time"])
        metrics = [Metric(name, value, when_ms, step) for name, value in record.items() if name not in ("step", "time")]
        self._client.log_batch(self.run, metrics=metrics)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """Write a file for each sample: MLflow's own tables need pandas."""
        try:
            for sample in samples:
                self._client.log_text(self.run, sample.text, f"samples/step_{sample.step}_{sample.which}.txt")
        except Exception as error:  # any store's
            log.warning("MLflow's artifact store refused the samples of step %d: %s", samples[0].step, error)

    def close(self) -> None:
        self._client.set_terminated(self.run)
