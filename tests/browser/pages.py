"""Loads a page in Debian's Chromium and returns what it shows."""

import subprocess
from pathlib import Path

CHROMIUM = "/usr/bin/chromium"
SETTLE_MS = 5000  # of the page's own time, in which its requests are answered


def dom_of(url: str, folder: Path) -> str:
    """The HTML of the page after its script has run."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += [f"--virtual-time-budget={SETTLE_MS}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
