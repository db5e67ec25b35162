"""Checks that all hosts of a learner were started alike: with one folder that all see, and alike settings, code, files.

Without them, ranks would train with different settings, or wait for each other for ever, and nothing would say so.
"""

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import code_of, digest_of
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.ranks.ranks import Ranks, refuse_together, share

ROOMS = ("common", "envhub", "learner", "replay", "tools")  # whose code ranks run


def check_hosts(config: Config, run_dir: RunDir, *, ranks: Ranks) -> None:
    """Raise ConfigError on every rank unless the hosts of the learner were started alike. Every rank calls it."""
    learner = config.learner
    if learner.hosts == 1:
        return
    if learner.ranks != ranks.num_ranks:
        raise ConfigError(
            f"`learner.ranks` is {learner.ranks}, but {ranks.num_ranks} ranks have been started; start all hosts with "
            "the same learner.ranks and learner.hosts"
        )
    check_shared(run_dir.path, ranks=ranks)
    check_alike(facts_of(config, Path(config.model.path or run_dir.model)), ranks=ranks)


def facts_of(config: Config, model_folder: Path) -> dict[str, str]:
    """What must be the same on all hosts, by its name."""
    own = {f"the file of objective.{key}": digest_of(name) for key, name in config.objective.own_parts.items()}
    return own | {
        "the settings": _digest(dump_config(config).encode()),
        "Slipstream's code": code_of(ROOMS),
        "the version of torch": str(torch.__version__),
        "the version of transformers": transformers.__version__,
        "config.json of `model.path`": _digest((model_folder / "config.json").read_bytes()),
    }


def check_alike(facts: Mapping[str, object], *, ranks: Ranks) -> None:
    """Raise ConfigError on every rank unless all of them have the same `facts`. Every rank calls it."""
    mine = {name: str(value) for name, value in facts.items()}
    theirs = share(mine, dict, ranks=ranks)
    differing = [
        f"{name} ({mine.get(name, 'none')}, rank 0 has {theirs.get(name, 'none')})"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    reason = f"rank {ranks.rank} differs from rank 0 in {' and '.join(differing)}; make its host like that of rank 0"
    refuse_together(reason if differing else "", ranks=ranks)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def check_shared(folder: Path, *, ranks: Ranks) -> None:
    """Raise ConfigError on every rank unless all of them see the same `folder`. Every rank calls it.

    Each rank writes its shards of a checkpoint there. On different disks none would ever be whole.
    """
    number = torch.tensor(secrets.randbits(62) if ranks.rank == 0 else 0, device=ranks.device)
    dist.broadcast(number, src=0)
    mark = folder / f"seen_by_all_ranks_{int(number):x}"  # a new name, which no host can have cached as missing
    if ranks.rank == 0:
        mark.touch()
    dist.barrier()
    blind = (
        f"rank {ranks.rank} does not see the folder {folder} of rank 0, but one of its own; mount one shared folder as "
        "`run.root` at the same path on every host of the learner"
    )
    try:
        refuse_together("" if mark.exists() else blind, ranks=ranks)
    finally:
        if ranks.rank == 0:
            mark.unlink()
