"""Measures which families of models train exactly: `python -m tools.families [FAMILY ...] [--write]`.

Each row takes the start of one vLLM engine. With `--write` the table replaces the one in docs/models.md.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from pathlib import Path

from learner.ranks import join_ranks, leave_ranks
from tools.families.measure import COLUMNS, measure
from tools.families.tiny import FAMILIES


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.families", description=__doc__)
    parser.add_argument("family", nargs="*", help=f"one of {', '.join(FAMILIES)}; none: all of them")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=Path, help="a file of JSON lines to append each row to")
    options = parser.parse_args(arguments)
    ranks = join_ranks(timeout_s=600)
    for name in options.family or FAMILIES:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="families-") as root:
            cells = measure(FAMILIES[name], Path(root), ranks=ranks, dtype=options.dtype)
        print(
            f"{name} ({time.monotonic() - started:.0f} s): "
            + "; ".join(f"{column} {cells[column]}" for column in COLUMNS),
            flush=True,
        )
        if options.rows:
            with options.rows.open("a") as file:
                file.write(
                    json.dumps(
                        {"family": name, "date": datetime.date.today().isoformat(), "dtype": options.dtype, **cells}
                    )
                    + "\n"
                )
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
