"""`slipstream learner`: prepare the run and train, in one process or in one per rank under torchrun."""

import logging
import os
import sys
from typing import NoReturn

from common.config import Config, ConfigError
from common.connection import RedisUnreachable, connect_or_explain
from common.run_dir import RunDir
from common.shutdown import Shutdown, die_with_parent

RANK_TIMEOUT_S = 1800.0


def train(config: Config) -> int:
    """Return the exit code: 0 the run is finished, 75 or 130 told to stop; a checkpoint is written first."""
    die_with_parent()
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name a server, or use `slipstream up`, which starts one")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    shutdown = Shutdown()
    try:
        connect_or_explain(config.redis.url).close()
    except RedisUnreachable as error:
        raise ConfigError(str(error)) from None
    if "RANK" in os.environ:
        return _train_rank(config, RunDir(config.run.root, config.run.name), shutdown)
    from tools.prepare import prepare  # after the quick checks: it imports transformers

    run_dir = prepare(config)
    if config.learner.ranks > 1:
        _become_torchrun(config, run_dir)
    return _train_rank(config, run_dir, shutdown)


def _train_rank(config: Config, run_dir: RunDir, shutdown: Shutdown) -> int:
    from learner.learn import learn
    from learner.ranks import join_ranks, leave_ranks

    ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        return 0 if learn(config, run_dir, ranks=ranks, shutdown=shutdown) else shutdown.exit_code
    finally:
        leave_ranks()


def _become_torchrun(config: Config, run_dir: RunDir) -> NoReturn:
    """Torchrun starts this verb once a rank, and hands signals on."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.learner.ranks}",
        "-m", "tools.cli", "learner", str(run_dir.config), f"redis.url={config.redis.url}",
    ]  # fmt: skip
    os.execv(command[0], command)
