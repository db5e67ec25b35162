"""An actor whose scripted policy plays and judges: `python -m tests.actors.judging_actor NAME [section.key=value]`."""

import os
import sys

from slipstream.actors.__main__ import main
from slipstream.common.config.config import Config
from tests.actors.host.test_own_judge_stage import Policy


def start(name: str, *, run: Config, mine: Config, model_path: str) -> Policy:
    return Policy()


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:], lambda: start))
