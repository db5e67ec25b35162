"""The process of one item: `python -m slipstream.tools.lab.gpu_check.item MODULE DEVICE FILE` writes its rows to FILE.

Exit codes: 0 with the rows as found, 1 after an error, LACKS if a package is missing, whose name is the last line.
"""

import importlib
import sys
import traceback
from pathlib import Path

from slipstream.tools.lab.gpu_check.findings import Findings

LACKS = 3
OURS = "slipstream"


def main(module: str, device: str, path: str) -> int:
    """Run `check` of the item's module, which reports to the findings."""
    with Path(path).open("a") as file:
        try:
            importlib.import_module(module).check(Findings(file=file), device)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package == OURS:
                raise
            print(f"the Python package {package} is not installed", file=sys.stderr)
            return LACKS
        except Exception:  # what is wrong, for the person who reads the report
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
