"""The engine process with a batch in flight between two steps, as on a GPU.

`python -m tests.actors.overlapped_engine FD`. On a CPU vLLM refuses overlapped scheduling. Its queue of batches, which
pipeline parallelism uses too, runs there: the weights compute a batch when it is scheduled, and its tokens are
collected one or two steps later.
"""

import os
import sys
from multiprocessing.connection import Connection

from vllm.config import VllmConfig

from slipstream.actors.engine.serve_engine import main

if __name__ == "__main__":
    VllmConfig.max_concurrent_batches = property(lambda config: 2)
    main(Connection(int(sys.argv[1])))
    os._exit(0)
