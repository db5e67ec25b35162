"""`slipstream learner --replay-archive RUN`: train again on what RUN's steps were trained on, and compare the two."""

import logging
import os
import sys
from pathlib import Path

from common.config import Config, dump_config, load_config
from common.config_error import ConfigError
from common.run_dir import RunDir, write_whole
from common.shutdown import Shutdown, die_with_parent
from replay.archive import Archive, ArchiveError
from tools.check_input import check_model_folder
from tools.child import EXIT_BAD_INPUT
from tools.train import RANK_TIMEOUT_S, become_torchrun

log = logging.getLogger(__name__)


def rerun(config: Config) -> int:
    """Return the exit code: 1 where RUN's own settings gave other weights than RUN's, else 0; 75 or 130 told to stop.

    A checkpoint is written before it stops, and the same command goes on from it.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    original, run_dir = RunDir(config.run.root, config.run.rerun_of), RunDir(config.run.root, config.run.name)
    shutdown, original_config = Shutdown(), _config_of(original)
    archive = Archive(original.trajectories, original_config.run.name)
    with shutdown.nothing_to_lose():
        if "RANK" in os.environ:
            die_with_parent(os.getppid())  # torchrun, which prepared the run before it became torchrun
        else:
            _prepare(config, run_dir, archive, original, original_config)
        from learner.ranks import join_ranks, leave_ranks  # after the quick checks: they import torch
        from learner.rerun import train_again
        from learner.rerun_check import judge

        ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        if not train_again(config, run_dir, archive, original.demonstrations, ranks=ranks, shutdown=shutdown):
            return shutdown.exit_code
        if ranks.rank > 0:
            return 0
        verdict = judge(config, run_dir, original_config=original_config, original=original)
        print(verdict.text)
        return verdict.exit_code
    except ArchiveError as error:
        print(f"slipstream learner: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        leave_ranks()


def _config_of(run_dir: RunDir) -> Config:
    """The run's own, with the folder of the model that it began with. Raises ConfigError."""
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.path} is no run: it has no config.yaml")
    config = load_config(str(run_dir.config), [])
    config.model.path = config.model.path or str(run_dir.model)
    return config


def _prepare(config: Config, run_dir: RunDir, archive: Archive, original: RunDir, original_config: Config) -> None:
    """Check what can be seen to be wrong, and make the directory. Raises ConfigError."""
    if not archive.last_step:
        raise ConfigError(
            f"run {original.path.name!r} has no archive in {original.trajectories}: no step was made with "
            "`replay.archive=true`"
        )
    if run_dir.config.exists() and _config_of(run_dir).run.rerun_of != config.run.rerun_of:
        raise ConfigError(
            f"run {config.run.name!r} exists in {run_dir.path} and is no re-run of {config.run.rerun_of!r}; choose "
            "another run.name"
        )
    config.model.path = config.model.path or original_config.model.path
    check_model_folder(Path(config.model.path), max_tokens=config.model.max_tokens)
    if config.warm_start.episodes and not original.demonstrations.is_file():
        raise ConfigError(f"`warm_start.episodes` {config.warm_start.episodes}: {original.path} has no demonstrations")
    run_dir.create()
    write_whole(run_dir.config, dump_config(config))
    if config.learner.ranks > 1:
        become_torchrun("learner", config, run_dir)
