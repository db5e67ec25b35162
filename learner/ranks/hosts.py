"""Checks that all hosts of a learner were started alike: with one folder, the same settings, code and files.

Without them, ranks would train with different settings, or wait for each other for ever, and nothing would say so.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import transformers

from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.imported import code_of, digest_of
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.ranks.ranks import Ranks, refuse_together, share
from slipstream.learner.ranks.shared_folder import check_shared

ROOMS = ("common", "envhub", "learner", "replay", "tools")  # whose code ranks run


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    by_name: dict[str, str]


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
    theirs = share(_Facts(by_name=mine), _Facts, ranks=ranks).by_name
    differing = [
        f"{name} ({mine.get(name, 'none')}, rank 0 has {theirs.get(name, 'none')})"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    reason = f"rank {ranks.rank} differs from rank 0 in {' and '.join(differing)}; make its host like that of rank 0"
    refuse_together(reason if differing else "", ranks=ranks)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
