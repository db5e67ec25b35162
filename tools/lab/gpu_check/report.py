"""The report of the GPU check: gpu_check.json for programs, gpu_check.md and a summary for people."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from slipstream.tools.lab.gpu_check.findings import Result, Row


def write_report(folder: Path, results: Sequence[Result], *, device: str) -> None:
    """Write both files whole, so that a kill leaves the report of the items before."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    whole = {"date": date, "device": device, "items": [asdict(result) for result in results]}
    _write(folder / "gpu_check.json", json.dumps(whole, indent=1) + "\n")
    _write(folder / "gpu_check.md", markdown(results, device=device, date=date))


def markdown(results: Sequence[Result], *, device: str, date: str) -> str:
    """One table of all items, and one of each item's rows."""
    form = "on a GPU" if device == "cuda" else "the reduced form, on a CPU"
    lines = [f"# GPU check, {form}", "", f"{date}. `python -m slipstream.tools.lab.gpu_check --device {device}`", ""]
    lines += ["| item | result | seconds | why |", "|---|---|---|---|"]
    lines += [
        f"| {result.name} | {result.state} | {result.seconds:.1f} | {_cell(result.reason)} |" for result in results
    ]
    for result in results:
        lines += ["", f"## {result.name}: {result.state}", ""]
        if result.rows:
            lines += ["| what | value | bound | holds |", "|---|---|---|---|", *map(_line, result.rows)]
        if result.log:
            lines += ["", "```", result.log, "```"]
    return "\n".join(lines) + "\n"


def print_summary(results: Sequence[Result]) -> None:
    """Print each item with its result, and every bound that does not hold."""
    width = max(len(result.name) for result in results)
    for result in results:
        print(f"{result.name.ljust(width)}  {result.state.ljust(7)}  {result.seconds:6.1f} s  {result.reason}".rstrip())
        for row in result.broken:
            print(f"{' ' * width}  {row.name}: {shown_value(row)}, must be {row.bound}")


def shown_value(row: Row) -> str:
    """The value with its unit."""
    number = row.value if isinstance(row.value, str) else f"{row.value:.4g}"
    return f"{number} {row.unit}".rstrip()


def _line(row: Row) -> str:
    holds = "" if row.holds is None else "yes" if row.holds else "**no**"
    return f"| {_cell(row.name)} | {_cell(shown_value(row))} | {row.bound} | {holds} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _write(path: Path, text: str) -> None:
    half = path.with_name(path.name + ".half")
    half.write_text(text)
    half.replace(path)
