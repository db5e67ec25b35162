"""An actor process whose scripted policy plays and judges: `python -m tests.judging_actor NAME [section.key=value]`."""

import os
import sys

from actors.__main__ import StartEngine, main
from common.config import Config
from tests.test_own_judge_stage import Policy


def begin() -> StartEngine:
    return start


def start(name: str, *, run: Config, mine: Config, model_path: str) -> Policy:
    return Policy()


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:], begin))
