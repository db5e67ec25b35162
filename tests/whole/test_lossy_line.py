"""A pull over a line that delays and loses packets, and that is cut meanwhile."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from tests.waiting import wait_until
from tests.whole.bare_host import BareHost
from tests.whole.lossy_line import NEAR, TUN

DATA = os.urandom(2 << 20)
DEADLINE_S = 120.0
CUT_S = 6.0  # longer than fetch.SILENCE_S
PULLER = """
import hashlib
from slipstream.actors.weights.pull import Puller
from slipstream.actors.weights.sources import Sources
from slipstream.common.transfer.chunks import Blob
sources = Sources(list, name="me", host="here", patience_s=0.0)
puller = Puller(sources, blame=print, chunk_bytes=4 << 20, key=None)
blob = Blob(root="root", num_bytes={num_bytes})
data = puller.pull(blob, publisher="tcp://127.0.0.1:{port}", check=lambda _: None, timeout_s=600)
print(hashlib.sha256(data).hexdigest())
"""

pytestmark = pytest.mark.skipif(not os.access(TUN, os.W_OK), reason=f"{TUN} cannot be opened by this user")


def test_a_pull_over_a_slow_line_continues_after_a_cut_with_what_is_missing(tmp_path: Path) -> None:
    """A chunk of the configured 4 MiB takes 18 s on this line; a source that is silent for 5 s counts as failed."""
    limits = ServerLimits(fan_out=1, chunk_bytes=4 << 20)
    server = ChunkServer(
        "127.0.0.1", lambda asked: DATA[asked.offset : asked.offset + asked.num_bytes], limits=limits, key=None
    )
    port, hidden = int(server.endpoint.rpartition(":")[2]), tmp_path / "runs"
    with BareHost("host", tmp_path, hidden=hidden, variables={}, seed=7) as host:
        host.link(port)
        (host.links / "client.py").write_text(PULLER.format(port=port, num_bytes=len(DATA)))
        host.start("until python /tmp/links/client.py; do sleep 0.2; done")
        wait_until(lambda: host.line.num_bytes[NEAR] >= len(DATA) // 2, "half of the bytes", timeout_s=DEADLINE_S)
        host.line.is_cut = True
        time.sleep(CUT_S)
        host.line.is_cut = False
        assert host.wait(DEADLINE_S) == 0
        assert hashlib.sha256(DATA).hexdigest() == host.said().splitlines()[-1]
        assert host.line.num_lost > 0
    server.close()
