"""Freed memory is used again, without a page that the kernel must fill with zeros."""

import subprocess
import sys

import pytest

AGAIN = """
import resource
from slipstream.common.process.kept_memory import keep_freed_memory
{first}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""
PAGES = (64 << 20) // 4096


@pytest.mark.parametrize(("first", "fewest", "most"), [("keep_freed_memory()", 0, 100), ("", PAGES // 2, 2 * PAGES)])
def test_a_large_block_comes_back_as_it_was_freed(first: str, fewest: int, most: int) -> None:
    command = [sys.executable, "-P", "-c", AGAIN.format(first=first)]
    assert fewest <= int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) <= most
