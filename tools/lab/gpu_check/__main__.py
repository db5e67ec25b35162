"""`make gpu-check`: does the learner compute the same on this GPU, and how fast? Each item is a process of its own.

It needs no `make setup`: an item that lacks a package says so, and the others run. The report is written after every
item. With `--device cpu` everything runs in a reduced form without a GPU.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.tools.lab.gpu_check.findings import Result, Row, read_rows
from slipstream.tools.lab.gpu_check.item import LACKS
from slipstream.tools.lab.gpu_check.report import print_summary, write_report

REPOSITORY = Path(__file__).resolve().parents[3]
TOTAL_S = 540.0
# Each item is the module of that name here, with its limit in seconds; the most decisive come first.
ITEMS = {
    "environment": 60.0,
    "kernels": 90.0,
    "packing": 90.0,
    "head": 60.0,
    "steps": 90.0,
    "combinations": 120.0,
    "shape": 150.0,
    "publisher": 90.0,
    "exchange": 60.0,
    "sharing": 90.0,
    "resume": 90.0,
    "loop": 120.0,
}
CPU_PATIENCE = 4  # times the limits of a GPU, in the reduced form: others may use the cores
MAX_THREADS = 8  # of a process on a machine with a GPU
LOG_CHARS = 4000  # of an item's output in the report, if it fails


def main(arguments: list[str]) -> int:
    """Run the items; return 0 if all of them passed, else 1."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    started, results = time.monotonic(), list[Result]()
    patience = CPU_PATIENCE if options.device == "cpu" else 1
    for name in options.only:
        limit_s = min(patience * ITEMS[name], patience * TOTAL_S - (time.monotonic() - started))
        results.append(run_item(f"slipstream.tools.lab.gpu_check.{name}", device=options.device, limit_s=limit_s))
        print(f"{name}: {results[-1].state}, {results[-1].seconds:.1f} s", flush=True)
        write_report(options.out, results, device=options.device)
    print_summary(results)
    print(f"written to {options.out}/gpu_check.json and gpu_check.md")
    return 0 if all(result.state == "passed" for result in results) else 1


def run_item(module: str, *, device: str, limit_s: float) -> Result:
    """Run one item in a process of its own; whatever it leaves behind is killed."""
    name = module.rpartition(".")[2]
    if limit_s <= 1:
        return Result(name=name, state="not run", reason="the time for all items was over")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream.tools.lab.gpu_check.item", module, device, str(rows)],
                cwd=REPOSITORY,
                env=_environment(device),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                exit_code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = read_rows(rows.read_text() if rows.exists() else "")
        printed = log.read_text(errors="replace").strip()
    seconds = time.monotonic() - started
    if exit_code == LACKS:
        return Result(name=name, state="not run", reason=_last_line(printed), seconds=seconds, rows=found)
    reason = _failure(exit_code, printed, found, limit_s)
    log_end = printed[-LOG_CHARS:] if reason else ""
    state = "failed" if reason else "passed"
    return Result(name=name, state=state, reason=reason, log=log_end, seconds=seconds, rows=found)


def _failure(exit_code: int | None, printed: str, found: list[Row], limit_s: float) -> str:
    """Why the item failed, in one line; empty if it passed."""
    if exit_code is None:
        return f"not finished within {limit_s:.0f} s"
    if exit_code:
        return f"exit code {exit_code}: {_last_line(printed)}"
    broken = [row.name for row in found if row.holds is False]
    if broken:
        return f"out of bounds: {', '.join(broken)}"
    return "" if any(row.holds for row in found) else "it checked nothing"


def _last_line(printed: str) -> str:
    return printed.splitlines()[-1] if printed else "it printed nothing"


def _environment(device: str) -> dict[str, str]:
    """Of an item: without GPUs in the reduced form, so that it is the same on every machine."""
    threads = 1 if device == "cpu" else min(MAX_THREADS, os.cpu_count() or 1)
    paths = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | own | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the reduced form")
    parser.add_argument("--only", nargs="+", choices=tuple(ITEMS), default=tuple(ITEMS), help="these items only")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "build/gpu-check")),
        help="folder of the report; $OUT, or build/gpu-check",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
