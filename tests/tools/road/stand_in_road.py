"""`slipstream up` with stand-ins for its stages: `python -m tests.tools.road.stand_in_road FILE [a.b=c ...]`."""

import sys

from slipstream.tools.cli.cli import main
from slipstream.tools.road import road

if __name__ == "__main__":
    road.CLI = [sys.executable, "-m", "tests.tools.road.road_verbs"]
    road.PREPARE = [*road.CLI, "prepare"]
    sys.exit(main(["up", *sys.argv[1:]]))
