"""What the runs of studies train."""

from pathlib import Path

TASK = str(Path(__file__).with_name("shop.yaml"))
