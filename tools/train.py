"""`slipstream learner`: prepare the run and train, in one process or in one per rank under torchrun."""

import logging
import os
import sys
from typing import NoReturn

from common.config import Config
from common.config_error import ConfigError
from common.connection import check_servers
from common.log import log_to_stderr
from common.printable import printable_block
from common.run_dir import RunDir
from common.shutdown import Shutdown, die_with_parent
from tools.check_input import check_input
from tools.child import EXIT_BAD_INPUT
from tools.devices import VARIABLE

RANK_TIMEOUT_S = 1800.0


def train(config: Config) -> int:
    """Train the run; return the exit code. 0: it is finished. 75 or 130: stopped by a signal, after a checkpoint."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name a Redis server, or use `slipstream up`, which starts one")
    if config.learner.devices:  # before torch looks for GPUs
        os.environ[VARIABLE] = ",".join(config.learner.devices)
    log_to_stderr()
    shutdown, run_dir = Shutdown(), RunDir(config.run.root, config.run.name)
    with shutdown.nothing_to_lose():
        if "RANK" in os.environ:
            die_with_parent(os.getppid())  # torchrun, which prepared the run before it became torchrun
        else:
            _prepare(config, run_dir)
        from learner.learn import learn  # after the quick checks, as it imports torch
        from learner.ranks import join_ranks, leave_ranks
        from learner.refusals import AllRefuse
        from learner.standstill import NothingLearned
        from learner.supply import SupplyDried
        from replay.archive import ArchiveError
        from replay.keys import FencedOut, RunForgotten

        ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        if not learn(config, run_dir, ranks=ranks, shutdown=shutdown):
            return shutdown.exit_code
        if ranks.rank == 0:
            logging.info("the run is finished; the trained model is in %s", run_dir.trained_model)
        return 0
    except (
        SupplyDried,
        NothingLearned,
        AllRefuse,
        FencedOut,
    ) as error:  # a retry would fail again, or fence out the newer learner
        print(printable_block(f"slipstream learner: {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT
    except (ArchiveError, RunForgotten) as error:  # a retry may find disk space, or register the run again
        print(printable_block(f"slipstream learner: {error}"), file=sys.stderr)
        return 1
    finally:
        leave_ranks()


def _prepare(config: Config, run_dir: RunDir) -> None:
    check_input(config)
    check_servers(config.redis.url, config.redis.shards)
    from tools.prepare import prepare  # it imports transformers

    prepare(config)
    if config.learner.ranks > 1:
        become_torchrun("learner", config, run_dir)


def become_torchrun(verb: str, config: Config, run_dir: RunDir, *options: str) -> NoReturn:
    """Replace this process by torchrun, which starts `verb` once per rank and forwards signals."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={config.learner.ranks}",
        "-m",
        "tools.cli",
        verb,
        str(run_dir.config),
        *options,
    ]
    os.execv(command[0], command)
