"""Makes the pictures of docs/see.md and README from one real run: `make pictures`.

The run is the quickstart. Its terminal is recorded as SVG; TensorBoard, the report and the viewer are shown by Debian's
Chromium.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from slipstream.common.config.config import load_config
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.lead.overview import pinned_link
from slipstream.replay.run.archive import Archive
from slipstream.tools.run.up import free_port

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
NAME, COLUMNS, ROWS, WIDTH = "pictures", 80, 60, 100
CONFIG = "conf/quickstart.yaml"
STEPS = load_config(CONFIG, []).learner.steps
PRICE = "actors.price_per_hour=0.5"
UP = ("up", CONFIG, f"run.name={NAME}", PRICE)
CHROMIUM = "/usr/bin/chromium"
DEADLINE_S = 900.0
MOST_LINES = 12  # of `up`'s steps


def main() -> None:
    """Run, record and write the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the run is `runs/pictures`, as a reader's would be
        run_dir = RunDir("runs", NAME)
        session = _recorded(run_dir)
        (IMAGES / "terminal.svg").write_text(_svg(session.replace(str(Path.cwd()), "...")))
        _shoot(run_dir)


def _recorded(run_dir: RunDir) -> str:
    """The output of `up`, with that of `top` in the middle."""
    output_file = Path("output")
    with output_file.open("w") as out:
        up = subprocess.Popen(_slipstream(UP), stdout=out, env=os.environ | {"COLUMNS": "200"})
    try:
        _wait(lambda: _num_steps(run_dir) >= STEPS // 2, up)
        top = _in_a_terminal(_slipstream(["top", f"run.name={NAME}", "--once"]))
        if up.wait(DEADLINE_S):
            raise SystemExit(f"`slipstream up` failed: {output_file.read_text()}")
    finally:
        up.terminate()
    lines = output_file.read_text().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    begun, ended = lines[: lines.index(steps[0])], lines[lines.index(steps[-1]) + 1 :]
    begun = [line for line in begun if not line.startswith("TensorBoard with")]
    return "\n".join(
        [
            f"$ slipstream {' '.join(UP)}",
            *begun,
            *steps[: MOST_LINES // 2],
            "...",
            f"$ slipstream top run.name={NAME} --once      # in another terminal",
            top,
            "...",
            *steps[-MOST_LINES // 2 :],
            *ended,
        ]
    )


def _slipstream(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", *arguments]


def _num_steps(run_dir: RunDir) -> int:
    return sum("trained/reward" in record for record in read_metrics(run_dir.metrics))


def _wait(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("`slipstream up` did not come that far")
        time.sleep(0.2)


def _in_a_terminal(command: Sequence[str]) -> str:
    """The output of `command` in a terminal of 80 columns, with its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm-256color"}):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # the terminal's end, when its last writer has ended
            pass
    os.close(ours)
    return shown.decode().replace("\r\n", "\n").rstrip("\n")


def _svg(session: str) -> str:
    """The session as SVG that loads nothing."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(session))
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="slipstream", code_format=plain)


def _shoot(run_dir: RunDir) -> None:
    """Show TensorBoard, the report and the viewer in a browser, and write what it shows."""
    port = free_port(6006)
    board = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(run_dir.tensorboard.absolute()),
        "--port",
        str(port),
    ]
    with _serving(board, port):
        time.sleep(10)  # it reads the files
        _screenshot(pinned_link(f"http://127.0.0.1:{port}"), "tensorboard.png", width=2100, height=1160)
    _screenshot((run_dir.path / "report.html").absolute().as_uri(), "report.png", height=1300)
    port = free_port(0)
    with _serving([*_slipstream(["view"]), str(run_dir.path), "--port", str(port)], port):
        group = _mixed_group(Archive(run_dir.trajectories, NAME))
        page = f"http://127.0.0.1:{port}/#steps/{STEPS}"
        _screenshot(page, "view-step.png", height=900)
        _screenshot(f"{page}/groups/{group}", "view-siblings.png", height=900)
        _screenshot(f"{page}/groups/{group}/tree", "view-tree.png", height=900)
        _screenshot(f"{page}/groups/{group}/members/0", "view-episode.png", height=900)


def _mixed_group(archive: Archive) -> int:
    """The first group of the last step whose members earned different returns, or the first of all."""
    groups = archive.read(STEPS, vocab_size=1 << 20, max_group_bytes=1 << 30).groups
    mixed = [group for group in groups if len({member.total_reward for member in group.trajectories}) > 1]
    return (mixed or groups)[0].ticket.group_id


@contextmanager
def _serving(command: Sequence[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urlopen(f"http://127.0.0.1:{port}/").close()
                break
            except OSError:
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _screenshot(url: str, name: str, *, height: int, width: int = 1200) -> None:
    with tempfile.TemporaryDirectory() as profile:
        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=40000",
            "--disable-webgl2",  # it draws in a worker, and virtual time does not wait for that
        )
        command = [CHROMIUM, *options, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        subprocess.run(
            [*command, f"--screenshot={IMAGES / name}", url], check=True, timeout=180, stderr=subprocess.DEVNULL
        )


if __name__ == "__main__":
    main()
