"""The counts of `slipstream data`: what was read, what was kept, and why the rest was not."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Source:
    """The counts of one file."""

    path: str
    num_rows: int = 0
    num_kept: int = 0


@dataclass(kw_only=True, slots=True)
class Counts:
    """What has become of the rows so far."""

    sources: list[Source] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # by reason
    malformed: dict[str, int] = field(default_factory=dict)  # by the kind of fault
    first_fault: str = ""
    unread: dict[str, int] = field(default_factory=dict)  # fields that no reader knows, in rows that passed the filters
    num_trained: int = 0
    num_held_out: int = 0
    num_copies: int = 0  # rows with typing errors

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)


def count(counts: dict[str, int], key: str) -> None:
    """Count one more of `key`. A plain dict, unlike a Counter, is saved and read again as it is."""
    counts[key] = counts.get(key, 0) + 1


def listed(counts: dict[str, int]) -> str:
    """The counts in words, the highest first."""
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items(), key=lambda item: -item[1]))
