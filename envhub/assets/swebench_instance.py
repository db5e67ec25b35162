"""SWE-bench's instances, read from their files, and which of them work with the user's clones and environments.

https://www.swebench.com (https://arxiv.org/abs/2310.06770); SWE-bench_Lite, _Verified and others of the same format.
"""

import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.common.process.wire import MALFORMED
from slipstream.envhub.user_files import read_records

_NAMES = {"instance_id": r"[\w.-]+", "repo": r"[\w.-]+/[\w.-]+", "base_commit": r"[0-9a-f]{7,64}"}

log = logging.getLogger(__name__)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an instance that this environment uses."""

    instance_id: str
    repo: str  # owner/name
    base_commit: str
    problem_statement: str
    patch: str  # the real repair
    test_patch: str  # the tests of the repair
    fail_to_pass: str | tuple[str, ...] = msgspec.field(name="FAIL_TO_PASS")  # a list, or JSON of one
    pass_to_pass: str | tuple[str, ...] = msgspec.field(name="PASS_TO_PASS")
    version: str = ""

    def __post_init__(self) -> None:
        for name, pattern in _NAMES.items():
            value = getattr(self, name)
            if re.fullmatch(pattern, value) is None or value.startswith((".", "-")):
                raise ValueError(f"{name} must match {pattern}, got {value!r}")
        if not self.by_kind[0]:
            raise ValueError(f"{self.instance_id}: FAIL_TO_PASS must name at least one test, got none")

    @property
    def runner(self) -> str:
        """Which program runs its tests: "pytest", by their names, or by the repository "django" or "sympy"; else ""."""
        if all(re.match(r"[^:\s]+\.py::", name) for name in self.tests):
            return "pytest"
        return {"django/django": "django", "sympy/sympy": "sympy"}.get(self.repo, "")

    @property
    def tests(self) -> tuple[str, ...]:
        """The names of all tests that must pass. Raises ValueError if they are malformed."""
        broken, others = self.by_kind
        return broken + others

    @property
    def by_kind(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """FAIL_TO_PASS and PASS_TO_PASS. Raises ValueError if they are malformed."""
        return _names(self.fail_to_pass), _names(self.pass_to_pass)


@dataclass(frozen=True, kw_only=True, slots=True)
class Playable:
    instance: Instance
    clone: Path
    environment: Path  # a Python environment, with bin/python
    built: Path | None  # the files that its installation left in the repository


def read_playable(path: Path, clones: Path, environments: Path) -> tuple[Playable, ...]:
    """Return the instances of a file that work here; log how many do not, by reason.

    Raises ValueError if no instance works here, or the file is malformed.
    """
    found: list[Playable] = []
    left_out: Counter[str] = Counter()
    for instance in read_records(path, Instance):
        clone = clones / instance.repo.replace("/", "__")
        environment = _environment(instance, environments)
        if not instance.runner:
            left_out["have tests that no runner here runs"] += 1
        elif not clone.is_dir():
            left_out[f"need {clone}; run git clone https://github.com/{instance.repo} {clone}"] += 1
        elif environment is None:
            left_out[f"need an environment in {environments}, such as {instance.instance_id}/bin/python"] += 1
        else:
            path_of_built = environment.with_name(f"{environment.name}.built")
            built = path_of_built if path_of_built.is_dir() else None
            found.append(Playable(instance=instance, clone=clone, environment=environment, built=built))
    reasons = "".join(f"\n{count} {reason}" for reason, count in sorted(left_out.items()))
    if not found:
        raise ValueError(f"{path}: no instance works here; left out:{reasons or ' none'}")
    if reasons:
        log.warning("%s: %d instances work here; left out:%s", path, len(found), reasons)
    return tuple(found)


def _environment(instance: Instance, environments: Path) -> Path | None:
    """Return the environment named after the instance, else the one named after its repository and version."""
    names = [instance.instance_id, f"{instance.repo.replace('/', '__')}-{instance.version}"]
    folders = [environments / name for name in names]
    return next((folder for folder in folders if (folder / "bin" / "python").is_file()), None)


def _names(tests: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(tests, tuple):
        return tests
    try:
        return msgspec.json.decode(tests, type=tuple[str, ...])
    except MALFORMED as error:
        raise ValueError(f"tests must be a list or JSON of one, got {tests[:80]!r}: {error}") from error
