"""Measures which families of models train exactly: `python -m slipstream.tools.lab.families [FAMILY ...] [--write]`.

Each row takes the start of one vLLM engine. A row is appended to build/families.jsonl; `--write` puts the newest row of
each family into the table of docs/models.md; families without one keep their row there.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path

from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
from slipstream.tools.lab.families.measure import COLUMNS, measure
from slipstream.tools.lab.families.tiny import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
ROWS, PAGE = ROOT / "build" / "families.jsonl", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
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
    parser.add_argument("--write", action="store_true", help="replace the table in docs/models.md")
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
        write_table(PAGE, [json.loads(line) for line in ROWS.read_text().splitlines()])
    return 0


def write_table(page: Path, rows: list[dict[str, str]]) -> None:
    """Replace the table in `page` by one of the newest row of each family; the page's row where `rows` have none."""
    before, rest = page.read_text().split(BEGIN)
    old, after = rest.split(END)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines() if line.startswith("| ")}
    newest = {row["family"]: row for row in rows if row["family"] in FAMILIES}
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|{'---|' * (1 + len(COLUMNS))}"]
    for name in FAMILIES:
        if row := newest.get(name):
            lines.append(f"| {name} | {' | '.join(shown(row[column]) for column in COLUMNS)} |")
        elif name in kept:
            lines.append(kept[name])
    dates = sorted({row["date"] for row in newest.values()} | set(re.findall(r"\d{4}-\d\d-\d\d", old)))
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    caption = f"Measured on {days} with `make families`, on a CPU, in float32 where the row names no other dtype."
    page.write_text("\n".join([f"{before}{BEGIN}", caption, "", *lines, f"{END}{after}"]))


def shown(cell: str) -> str:
    """A cell of the table: numbers as they are, refusals in few words."""
    text = cell
    for pattern, words in SHORTER:
        text = re.sub(pattern, words, text)
    text = text.replace("|", "/")
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS].rstrip()} ..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
