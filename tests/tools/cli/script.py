"""A script as a program of its own, which may be a fork: `python -m tests.tools.cli.script FILE`."""

import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
