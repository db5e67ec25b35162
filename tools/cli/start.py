"""The command `slipstream`. Ctrl-C ends it without a traceback, also while modules are still imported."""

import sys


def main() -> int:
    try:
        from slipstream.tools.cli.cli import main as run  # here, as it takes a second in which Ctrl-C may come

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
