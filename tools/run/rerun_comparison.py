"""`slipstream learner --replay-archive RUN`: repeat RUN's training from its archive, and compare the weights."""

import logging
import sys
from functools import partial
from pathlib import Path

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.output import write_whole
from slipstream.common.process.printable import printable_block
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.objective.coherence import check_coherence
from slipstream.replay.run.archive import Archive, ArchiveError
from slipstream.tools.run.check_input import check_model_folder
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.train import RANK_TIMEOUT_S, become_ranks, train

log = logging.getLogger(__name__)


def train_or_rerun(config: Config) -> int:
    """Train the run, or repeat the training of `run.rerun_of`; return the exit code."""
    return rerun(config) if config.run.rerun_of else train(config)


def rerun(config: Config) -> int:
    """Repeat the training and print the comparison; return the exit code.

    1: the same settings and machine gave other weights. 0: otherwise. 75 or 130: stopped by a signal, after a
    checkpoint; the same command resumes from it.
    """
    log_to_stderr()
    run_dir = RunDir(config.run.root, config.run.name)
    original = RunDir(config.run.root, config.run.rerun_of)
    shutdown, original_config = Shutdown(), _config_of(original)
    archive = Archive(original.trajectories, original_config.run.name)
    with shutdown.nothing_to_lose():
        prepare = partial(_prepare, config, run_dir, archive, original, original_config)
        become_ranks("learner", config, run_dir, prepare=prepare)
    return training(run_dir, lambda: _repeat(config, run_dir, archive, original, original_config, shutdown))


def _repeat(
    config: Config, run_dir: RunDir, archive: Archive, original: RunDir, original_config: Config, shutdown: Shutdown
) -> int:
    with shutdown.nothing_to_lose():
        from slipstream.learner.probation.bounds import check_on_rank
        from slipstream.learner.ranks.hosts import check_hosts
        from slipstream.learner.ranks.ranks import join_ranks, leave_ranks, resolve_dtype  # they import torch
        from slipstream.learner.rerun import condition_differences, train_again
        from slipstream.learner.rerun_check import check_rerun

        ranks = join_ranks(timeout_s=RANK_TIMEOUT_S, context_ranks=config.learner.context_ranks)
    try:
        check_hosts(config, run_dir, ranks=ranks)
        check_on_rank(config, device=ranks.device)
        if not train_again(config, run_dir, archive, original.demonstrations, ranks=ranks, shutdown=shutdown):
            return shutdown.stopped_code
        if ranks.rank > 0:
            return 0
        resolve_dtype(original_config.model, ranks.device)
        archived = condition_differences(archive, config, ranks=ranks)
        check = check_rerun(config, run_dir, original_config=original_config, original=original, archived=archived)
        print(check.text)
        return check.exit_code
    except ArchiveError as error:
        print(printable_block(f"slipstream learner: {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        leave_ranks()


def _config_of(run_dir: RunDir) -> Config:
    """The run's configuration, with the folder of its initial model. Raises ConfigError."""
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.path} is not the directory of a run: it has no config.yaml")
    config = load_config(str(run_dir.config), [])
    config.model.path = config.model.path or str(run_dir.model)
    return config


def _prepare(config: Config, run_dir: RunDir, archive: Archive, original: RunDir, original_config: Config) -> None:
    """Check the input, and create the directory. Raises ConfigError."""
    if not archive.last_step:
        raise ConfigError(
            f"run {original.path.name!r} has no archive in {original.trajectories}: none of its steps ran with "
            "`replay.archive=true`"
        )
    if run_dir.config.exists() and _config_of(run_dir).run.rerun_of != config.run.rerun_of:
        raise ConfigError(
            f"run {config.run.name!r} exists in {run_dir.path} and is not a re-run of {config.run.rerun_of!r}; choose "
            "another run.name"
        )
    check_coherence(config)
    config.model.path = config.model.path or original_config.model.path
    check_model_folder(Path(config.model.path), max_tokens=config.model.max_tokens)
    if config.warm_start.episodes and not original.demonstrations.is_file():
        raise ConfigError(
            f"`warm_start.episodes` is {config.warm_start.episodes}, but {original.path} has no expert episodes; set "
            "it to 0"
        )
    run_dir.create()
    write_whole(run_dir.config, dump_config(config))
