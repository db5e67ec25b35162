"""What tests of sandboxes ask for."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def readable() -> Iterator[Path]:
    """Not in pytest's own folder, which the sandbox cannot read if these tests run as root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
