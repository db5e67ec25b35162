"""The highest version number that a run may have published: a Redis server that came back empty has forgotten it."""

from pathlib import Path

import msgspec

from slipstream.learner.checkpoint.sealed_file import read_sealed, write_sealed

_SCHEMA = 1


class _Highest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy_version: int


def load_highest_version(path: Path) -> int:
    """The number in `path`; -1 if there is no file. Raises ConfigError if it is damaged."""
    if not path.exists() and not path.is_symlink():
        return -1
    cure = "remove it, and if the Redis server has been emptied, end all actors before the learner starts"
    return read_sealed(path, _Highest, schema=_SCHEMA, cure=cure).policy_version


def save_highest_version(policy_version: int, path: Path) -> None:
    """Replace the number in `path`; it is on disk when this returns."""
    write_sealed(path, _Highest(policy_version=policy_version), schema=_SCHEMA)
