"""`slipstream learner`: prepare the run and train, in one process or in one per rank under torchrun."""

import logging
import os
import sys
from collections.abc import Callable

from slipstream.common.config.config import Config
from slipstream.common.config.learner_config import LearnerConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect_or_explain
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.printable import printable_block
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training
from slipstream.common.process.shutdown import Shutdown, die_with_parent
from slipstream.tools.run.check_input import check_input
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.devices import VARIABLE

RANK_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 600  # from the signal to stop: ranks write a checkpoint; torchrun would kill them after 30 s

log = logging.getLogger(__name__)


def train(config: Config) -> int:
    """Train the run; return the exit code. 0: it is finished. 75 or 130: stopped by a signal, after a checkpoint."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; name a Redis server, or use `slipstream up`, which starts one")
    if config.learner.devices and "RANK" not in os.environ:  # before torch looks for GPUs; ranks inherit their host's
        os.environ[VARIABLE] = ",".join(config.learner.devices)
    log_to_stderr()
    shutdown, run_dir = Shutdown(), RunDir(config.run.root, config.run.name)
    with shutdown.nothing_to_lose():
        become_ranks("learner", config, run_dir, prepare=lambda: _prepare(config))
    return training(run_dir, lambda: _learn(config, run_dir, shutdown))


def _learn(config: Config, run_dir: RunDir, shutdown: Shutdown) -> int:
    with shutdown.nothing_to_lose():
        from slipstream.learner.learn import learn  # after the quick checks, as it imports torch
        from slipstream.learner.probation.bounds import check_on_rank
        from slipstream.learner.ranks.hosts import check_hosts
        from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
        from slipstream.learner.step.stall_guard import NothingLearned
        from slipstream.learner.supply.refusals import AllRefuse
        from slipstream.learner.supply.supply import SupplyDried
        from slipstream.replay.records.keys import FencedOut, RunForgotten
        from slipstream.replay.run.archive import ArchiveError

        ranks = join_ranks(timeout_s=RANK_TIMEOUT_S, context_ranks=config.learner.context_ranks)
    try:
        check_hosts(config, run_dir, ranks=ranks)
        check_on_rank(config, device=ranks.device)
        if not learn(config, run_dir, ranks=ranks, shutdown=shutdown):
            return shutdown.stopped_code
        if ranks.rank == 0:
            logging.info("the run is finished; the trained model is in %s", run_dir.trained_model)
        return 0
    except (SupplyDried, NothingLearned, AllRefuse, FencedOut) as error:
        # A retry would fail again, or fence out the newer learner.
        print(printable_block(f"slipstream learner: {error}"), file=sys.stderr)
        return EXIT_BAD_INPUT
    except (ArchiveError, RunForgotten) as error:  # a retry may find disk space, or register the run again
        print(printable_block(f"slipstream learner: {error}"), file=sys.stderr)
        return 1
    finally:
        leave_ranks()


def _prepare(config: Config) -> None:
    check_input(config)
    connect_or_explain(config.redis.url).close()
    from slipstream.tools.run.prepare import prepare  # it imports transformers

    prepare(config)


def leads(config: Config) -> bool:
    """Whether this process writes the run: rank 0, or on host 0 the process that starts the ranks."""
    return os.environ.get("RANK", str(config.learner.host_rank)) == "0"


def become_ranks(verb: str, config: Config, run_dir: RunDir, *options: str, prepare: Callable[[], object]) -> None:
    """Prepare the run on host 0, and return in each rank.

    If there are several, torchrun replaces this process. It starts `verb` once per rank of this host, and forwards
    signals. Ranks of other hosts are waited for. All read the configuration that host 0 wrote into the run's directory.
    """
    if "RANK" in os.environ:
        die_with_parent(os.getppid())  # torchrun, which prepared the run before it became torchrun
        return
    learner = config.learner
    if not learner.host_rank:
        prepare()
    if learner.ranks == 1:
        return
    torchrun = [sys.executable, "-P", "-m", "slipstream.tools.run.torchrun"]
    place = _place(learner) if learner.hosts > 1 else ["--standalone"]
    rank = [sys.executable, "-u", "-P", "-m", "slipstream.tools.cli.cli", *verb.split(), str(run_dir.config), *options]
    command = [*torchrun, *place, f"--nproc-per-node={learner.ranks_per_host}", "--no-python", *rank]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_TIMEOUT_S))
    os.execv(command[0], command)


def _place(learner: LearnerConfig) -> list[str]:
    """The options of torchrun on one of several hosts. Raises ConfigError."""
    if not learner.rendezvous:
        raise ConfigError(
            f"`learner.rendezvous` is empty, with `learner.hosts` {learner.hosts}; name an address of host 0 and a "
            "free port there, the same on every host, such as learner.rendezvous=10.0.0.1:29500"
        )
    log.info("waiting for the %d hosts of the learner at %s", learner.hosts, learner.rendezvous)
    address, _, port = learner.rendezvous.rpartition(":")
    return [
        f"--nnodes={learner.hosts}",
        f"--node-rank={learner.host_rank}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]
