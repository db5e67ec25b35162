"""A relay of small and slow chunks: `python -m tests.actors.small_chunks CHUNK_BYTES BYTES_PER_S SETTING ...`."""

import sys
import time
from functools import partial

from slipstream.actors.host import relay
from slipstream.actors.weights.holdings import Holdings
from slipstream.common.transfer.chunk_server import ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.tools.cli.cli import main


class SlowHoldings(Holdings):
    bytes_per_s: float

    def read(self, request: ChunkRequest) -> memoryview | None:
        time.sleep(request.num_bytes / self.bytes_per_s)
        return super().read(request)


if __name__ == "__main__":
    chunk_bytes, bytes_per_s, *settings = sys.argv[1:]
    SlowHoldings.bytes_per_s = float(bytes_per_s)
    relay.ServerLimits, relay.Holdings = partial(ServerLimits, chunk_bytes=int(chunk_bytes)), SlowHoldings  # type: ignore[misc, assignment]
    sys.exit(main(["serve", "relay", *settings]))
