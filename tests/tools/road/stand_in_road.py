"""Walks a road of stand-ins: `python -m tests.tools.road.stand_in_road FILE [a.b=c ...]`."""

import sys

from slipstream.common.process.config_error import ConfigError
from slipstream.tools.road.road import walk_road
from slipstream.tools.road.road_file import read_road

VERBS = (sys.executable, "-m", "tests.tools.road.road_verbs")

if __name__ == "__main__":
    try:
        sys.exit(walk_road(read_road(sys.argv[1], sys.argv[2:]), cli=VERBS, prepare=(*VERBS, "prepare")))
    except ConfigError as error:
        sys.exit(f"{error}")
