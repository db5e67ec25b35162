"""Digests of the code that a run's environments consist of, so that all hosts play with the same code."""

import asyncio
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.common.config.env_config import EnvConfig
from slipstream.common.process.imported import code_of, is_own
from slipstream.common.text.action_format import check_formats
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.rewards.part import reward_parts

SLIPSTREAM = "slipstream"
SHARED_ROOMS = ("common", "envhub", "replay")  # which learner and actors both run


def own_modules(config: EnvConfig) -> dict[str, str]:
    """Make and close each environment of a run; return the digest of every module of the user's that is imported then.

    These are the modules of each package from which the configuration names a class or a function, as `module:NAME`.
    The digest of SHARED_ROOMS is added under the name SLIPSTREAM.
    Raises ValueError if an environment, a part of a reward or the action format cannot be made.
    """
    check_formats(config)
    for part in config.entries().values():
        asyncio.run(make_any_env(part.name, part.options).close())
    reward_parts(config.entries())
    named = [[part.name, part.options, part.rewards] for part in config.entries().values()]
    names = [config.action_format, *_texts(named)]
    modules = {name.partition(":")[0] for name in names if is_own(name)} & sys.modules.keys()
    packages = {module.partition(".")[0] for module in modules} - {SLIPSTREAM}
    return {SLIPSTREAM: code_of(SHARED_ROOMS)} | {
        name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name in sorted(sys.modules)
        if name.partition(".")[0] in packages and (file := file_of(name))
    }


def file_of(module: str) -> Path | None:
    """The Python file of an imported module; None if it has none."""
    file = getattr(sys.modules[module], "__file__", None)
    return Path(file) if file and file.endswith(".py") else None


def _texts(value: Any) -> Iterator[str]:
    """Every text in lists and mappings."""
    match value:
        case str():
            yield value
        case dict():
            yield from _texts(list(value.values()))
        case list() | tuple():
            for each in value:
                yield from _texts(each)
