"""SWE-bench's instances, as its files have them, and which of them can be played with what lies here.

https://www.swebench.com (https://arxiv.org/abs/2310.06770); SWE-bench_Lite, _Verified and others of the same form.
"""

import functools
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from envhub.asset import read_json, read_lines
from envhub.package import require_package

_NAMES = {"instance_id": r"[\w.-]+", "repo": r"[\w.-]+/[\w.-]+", "base_commit": r"[0-9a-f]{7,64}"}

log = logging.getLogger(__name__)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as far as it is needed."""

    instance_id: str
    repo: str  # owner/name
    base_commit: str
    problem_statement: str
    patch: str  # the repair, as people made it
    test_patch: str  # the tests that came with it
    fail_to_pass: str | tuple[str, ...] = msgspec.field(name="FAIL_TO_PASS")  # a list, or JSON of one
    pass_to_pass: str | tuple[str, ...] = msgspec.field(name="PASS_TO_PASS")
    hints_text: str | None = ""  # what was said of it before the repair
    version: str | None = ""

    def __post_init__(self) -> None:
        for name, pattern in _NAMES.items():
            value = getattr(self, name)
            if re.fullmatch(pattern, value) is None or value.startswith((".", "-")):
                raise ValueError(f"{name} is {value!r}, and should be like {pattern}")
        if len(self.tests) == len(_names(self.pass_to_pass)):
            raise ValueError(f"{self.instance_id}: FAIL_TO_PASS is empty, so nothing would be judged")

    @property
    def tests(self) -> tuple[str, ...]:
        """The names of all tests that must pass. Raises ValueError where they are no list."""
        return (*_names(self.fail_to_pass), *_names(self.pass_to_pass))


@dataclass(frozen=True, kw_only=True, slots=True)
class Playable:
    """An instance with what it is played on."""

    instance: Instance
    clone: Path
    environment: Path  # a Python environment, with bin/python
    built: Path | None  # what installing it left in the repository


@functools.lru_cache(maxsize=8)  # every episode makes an environment
def read_playable(path: Path, clones: Path, environments: Path) -> tuple[Playable, ...]:
    """The instances of a file that can be played; how many cannot is logged, by reason.

    Raises ValueError for a file that has none of them, or whose lines are no instances.
    """
    found: list[Playable] = []
    left_out: Counter[str] = Counter()
    for instance in _read(path):
        clone = clones / instance.repo.replace("/", "__")
        environment = _environment(instance, environments)
        if not all(re.match(r"[^:\s]+\.py::", name) for name in instance.tests):
            left_out["with tests that pytest does not run (django's and sympy's)"] += 1
        elif not clone.is_dir():
            left_out[f"without {clone}; git clone https://github.com/{instance.repo} {clone}"] += 1
        elif environment is None:
            left_out[f"without an environment in {environments}, such as {instance.instance_id}/bin/python"] += 1
        else:
            built = environment.with_name(f"{environment.name}.built")
            found.append(
                Playable(
                    instance=instance, clone=clone, environment=environment, built=built if built.is_dir() else None
                )
            )
    reasons = "".join(f"\n{count} {reason}" for reason, count in sorted(left_out.items()))
    if not found:
        raise ValueError(f"{path}: none of its instances can be played here; left out are:{reasons or ' none'}")
    if reasons:
        log.warning("%s: %d instances can be played, left out are:%s", path, len(found), reasons)
    return tuple(found)


def _read(path: Path) -> list[Instance]:
    if path.suffix == ".parquet":
        table: list[dict[str, Any]] = require_package("pyarrow.parquet", install="pyarrow").read_table(path).to_pylist()
        try:
            return [msgspec.convert(row, Instance) for row in table]
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}: {error}") from error
    return read_json(path, list[Instance]) if path.suffix == ".json" else read_lines(path, Instance)


def _environment(instance: Instance, environments: Path) -> Path | None:
    """The folder named after the instance, else after its repository and version."""
    names = [instance.instance_id, f"{instance.repo.replace('/', '__')}-{instance.version}"]
    folders = [environments / name for name in names]
    return next((folder for folder in folders if (folder / "bin" / "python").is_file()), None)


def _names(tests: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(tests, tuple):
        return tests
    try:
        return msgspec.json.decode(tests, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise ValueError(f"tests must be a list or JSON of one, got {tests[:80]!r}: {error}") from error
