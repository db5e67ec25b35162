"""`python -m tests.tools.data.killed_data SEED DATA-ARGUMENTS`: `slipstream data`, ended at random moments.

Ends processes by kill -9, and some by Ctrl-C. Prints how many. Each is a fork, which has imported everything already.
"""

import os
import random
import signal
import sys
import time

from slipstream.tools.cli.cli import main

SHORTEST_S, LONGEST_S, GROWTH = 0.02, 0.12, 1.2  # longer and longer, so that it ends
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT)


def run(seed: int, arguments: list[str]) -> int:
    """Return the number of processes that did not get to their end."""
    dice, longest_s, num_ended = random.Random(seed), LONGEST_S, 0
    while True:
        child = os.fork()
        if not child:
            _play(arguments)
        time.sleep(dice.uniform(SHORTEST_S, longest_s))
        os.kill(child, dice.choice(SIGNALS))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return num_ended
        assert code in (130, -signal.SIGKILL), code
        num_ended, longest_s = num_ended + 1, longest_s * GROWTH


def _play(arguments: list[str]) -> None:
    code = 130
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it
        code = main(["data", *arguments])
    finally:
        os._exit(code)


if __name__ == "__main__":
    print("ended", run(int(sys.argv[1]), sys.argv[2:]))
