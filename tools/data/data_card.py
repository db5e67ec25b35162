"""The data card of `slipstream data`: what was read, what was kept, and why the rest was not."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slipstream.tools.data.data_options import DataOptions
from slipstream.tools.terminal.options import as_arguments


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
    faults: list[str] = field(default_factory=list)  # the first ones
    replies: dict[int, int] = field(default_factory=dict)  # kept rows, by the bits of their number of replies
    chars: dict[int, int] = field(default_factory=dict)  # kept rows, by the bits of their number of characters
    marks: list[str] = field(default_factory=list)  # lines about the marks of a judge
    unread: dict[str, int] = field(default_factory=dict)  # fields that no reader knows, in rows that passed the filters
    num_trained: int = 0
    num_held_out: int = 0
    num_copies: int = 0  # rows with typing errors
    num_uncopied: int = 0  # rows without a word to change

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def num_malformed(self) -> int:
        return sum(self.malformed.values())

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


T = TypeVar("T")


def count(counts: dict[T, int], key: T) -> None:
    """Count one more of `key`. A plain dict, unlike a Counter, is saved and read again as it is."""
    counts[key] = counts.get(key, 0) + 1


def card(name: str, counts: Counts, options: DataOptions, *, seed: int, digests: Mapping[str, str]) -> str:
    """The card as Markdown. The same data, options and seed of the copies give the same card."""
    read = [[source.path, f"{source.num_rows:,}", f"{source.num_kept:,}"] for source in counts.sources]
    gone = [[reason, f"{number:,}"] for reason, number in _most_first(counts.dropped)]
    gone += [[f"cannot be read: {fault}", f"{number:,}"] for fault, number in _most_first(counts.malformed)]
    settings = as_arguments(dataclasses.replace(options, data=())) + ([f"run.seed={seed}"] if options.noise else [])
    lines = [
        f"# {name}",
        "",
        f"{counts.num_rows:,} rows were read: {counts.num_trained:,} are kept, {counts.num_held_out:,} held out, "
        f"{counts.num_dropped:,} dropped, and {counts.num_malformed:,} cannot be read.",
        "",
        f"Made by `slipstream data {shlex.join([name, *settings])}`.",
        "",
        "## Sources",
        "",
        *_table(("file", "rows", "kept"), read),
    ]
    if gone:
        lines += ["", "## Dropped", "", *_table(("reason", "rows"), gone)]
    if counts.faults:
        lines += ["", "The first that cannot be read:", "", *(f"- {_escaped(fault)}" for fault in counts.faults)]
    if counts.unread:
        fields = [[name, f"{number:,}"] for name, number in _most_first(counts.unread)]
        lines += ["", "## Fields that are not read", "", *_table(("field", "messages"), fields)]
    if counts.marks:
        lines += ["", "## Marks", "", *counts.marks]
    if options.noise:
        made = [["noise", f"{counts.num_copies:,}"], ["no copy: nothing to change", f"{counts.num_uncopied:,}"]]
        lines += ["", "## Copies with errors, beside the rows kept", "", *_table(("copies", "rows"), made)]
    lines += ["", "## Lengths of the rows kept", ""]
    lines += _table(("replies", "rows"), _histogram(counts.replies))
    lines += ["", *_table(("characters", "rows"), _histogram(counts.chars))]
    lines += ["", "## Files", "", *_table(("file", "SHA-256"), [[file, digest] for file, digest in digests.items()])]
    return "\n".join(lines) + "\n"


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _histogram(bits: Mapping[int, int]) -> list[list[str]]:
    """Counts by powers of two: values of b bits lie between 2^(b-1) and 2^b - 1."""
    return [[f"{1 << (size - 1):,} to {(1 << size) - 1:,}", f"{bits[size]:,}"] for size in sorted(bits) if size]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *([_escaped(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _escaped(text: str) -> str:
    """Text of a row or a file name, in which nothing is markup."""
    return "".join(f"\\{char}" if char in "|<>*_[]`#" else char for char in " ".join(text.split()))
