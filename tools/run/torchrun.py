"""Runs torchrun, and ends with the code of the rank that failed first.

`python -m slipstream.tools.run.torchrun ARGUMENT ...`. torchrun itself ends with 1, whatever happened, so a supervisor
would start a run with bad input again and again.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.run.child import EXIT_BAD_INPUT


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, that of a rank, 75 after a signal, 130 after Ctrl-C, 1 if a rank was killed."""
    try:
        torchrun(arguments)
    except SignalException as stopped:
        return 130 if stopped.sigval == signal.SIGINT else EXIT_PREEMPTED
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode != EXIT_BAD_INPUT:  # then the rank has written the reason
            print(f"slipstream: rank {rank} ended with code {failure.exitcode}", file=sys.stderr)
        return max(1, failure.exitcode)  # negative if a signal ended it
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
