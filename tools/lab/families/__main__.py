"""Measures which families of models train exactly: `python -m slipstream.tools.lab.families [FAMILY ...] [--write]`.

Each row takes the start of one vLLM engine. A row is appended to build/families.jsonl; `--write` puts the newest row of
each family into docs/families.json, and what they say into docs/models.md; families without one keep their row.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.families.measure import COLUMNS, NOT_REACHED, measure
from slipstream.tools.lab.families.tiny import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
ROWS, PAGE = ROOT / "build" / "families.jsonl", ROOT / "docs" / "models.md"
TABLE = ROOT / "docs" / "families.json"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
NUMBER = re.compile(r"\de[-+]\d\d")
ALIKE = 1e-4  # nats
SHORTER = (  # what a table shows of a refusal
    (r"^`model\.path` \S+ cannot be trained here: (.*?)(; docs/models\.md.*)?$", r"\1"),
    (
        r"^version \d+ is refused by its probe: .*? by (\S+) nats a token, by (\S+) at most.*",
        r"refused: \1 nats a token",
    ),
    (r"^the engine process failed: (.*)", r"vLLM does not start: \1"),
    (r"^\d+ validation errors? for \w+ (?:Value error, )?(.*?)(?:\. Please check.*)?$", r"vLLM does not start: \1"),
)
MAX_SHOWN_CHARS = 110


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.tools.lab.families", description=__doc__)
    parser.add_argument("family", nargs="*", help=f"any of: {'; '.join(FAMILIES)}. None: all of them")
    parser.add_argument("--write", action="store_true", help="replace the results in docs/")
    options = parser.parse_args(arguments)
    if unknown := set(options.family) - FAMILIES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    ROWS.parent.mkdir(exist_ok=True)
    ranks = join_ranks(timeout_s=600)
    for name in options.family or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="families-") as root:
            cells = measure(FAMILIES[name], Path(root), ranks=ranks)
        print(f"{name}: {'; '.join(f'{column} {cells[column]}' for column in COLUMNS)}", flush=True)
        row = {"family": name, "date": datetime.date.today().isoformat(), **cells}
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
    leave_ranks()
    if options.write:
        write_table(PAGE, TABLE, [json.loads(line) for line in ROWS.read_text().splitlines()])
    return 0


def write_table(page: Path, table: Path, rows: list[dict[str, str]]) -> None:
    """Put the newest of `rows` of each family into the JSON file `table`, and what they say into `page`."""
    measured = json.loads(table.read_text())
    newest = {row["family"]: row for row in rows if row["family"] in FAMILIES}
    families = measured["families"] | {
        name: {column: shown(row[column]) for column in COLUMNS} for name, row in newest.items()
    }
    dates = sorted({row["date"] for row in newest.values()} | set(measured["dates"]))
    measured = {
        "dates": [dates[0], dates[-1]],
        "families": {name: families[name] for name in FAMILIES if name in families},
    }
    table.write_text(json.dumps(measured, indent=1) + "\n")
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{summary(measured)}\n{END}{rest.split(END)[1]}")


def summary(measured: dict[str, Any]) -> str:
    """The families that are computed alike, and a table of the others that the learner loads."""
    families = {name: cells for name, cells in measured["families"].items() if cells["load"] == "yes"}
    alike = [name for name, cells in families.items() if all(within(cells[column]) for column in COLUMNS[1:])]
    others: dict[tuple[str, str], list[str]] = {}
    for name in (name for name in families if name not in alike):
        served = [families[name][column] for column in ("version 0", "publish 1", "publish 2")]
        largest = max(served, key=float) if all(map(NUMBER.fullmatch, served)) else served[0]
        others.setdefault((_brief(largest), _brief(families[name]["LoRA"])), []).append(name)
    rows = ["| family | vLLM | with LoRA |", "|---|---|---|"]
    rows += [f"| {'; '.join(names)} | {served} | {adapted} |" for (served, adapted), names in others.items()]
    caption = (
        f"Measured on {' to '.join(dict.fromkeys(measured['dates']))} with `make families`, on a CPU, in float32 where "
        "the name has no other dtype ([every number and error](families.json))."
    )
    return "\n".join([caption, "", f"**Alike**, within {ALIKE} nats: {'; '.join(alike)}.", "", *rows])


def _brief(cell: str) -> str:
    return cell if NUMBER.fullmatch(cell) or cell == NOT_REACHED else re.sub(r"^(?!refused).*", "fails", cell)


def within(cell: str) -> bool:
    return bool(NUMBER.fullmatch(cell)) and float(cell) <= ALIKE


def shown(cell: str) -> str:
    """A cell of the table: numbers as they are, refusals in few words."""
    text = cell
    for pattern, words in SHORTER:
        text = re.sub(pattern, words, text)
    text = text.replace("|", "/")
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS].rstrip()} ..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
