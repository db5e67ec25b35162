"""Reverb's side of `make bench-replay`, run by a Python of its own (requirements/reverb.txt) and by nothing else.

`serve` prints its port and serves until its standard input closes. `drive PORT FILE` takes `insert N WINDOW` and
`sample N` on its standard input, one a line, does so with the bytes of FILE, and answers each with its seconds.
"""

import sys
import time
from pathlib import Path

import numpy as np
import reverb

TABLE = "payloads"
MAX_ITEMS = 100_000


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
    else:
        drive(reverb.Client(f"localhost:{sys.argv[2]}"), np.frombuffer(Path(sys.argv[3]).read_bytes(), np.uint8))


def serve() -> None:
    # A queue in which every item is sampled once: what a learner takes from it leaves it, as with us.
    server = reverb.Server(
        [
            reverb.Table(
                name=TABLE,
                sampler=reverb.selectors.Fifo(),
                remover=reverb.selectors.Fifo(),
                max_size=MAX_ITEMS,
                max_times_sampled=1,
                rate_limiter=reverb.rate_limiters.MinSize(1),
            )
        ],
        port=None,
    )
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def drive(client: reverb.Client, payload: np.ndarray) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        started = time.perf_counter()
        if verb == "insert":
            insert(client, payload, num_items=int(numbers[0]), window=int(numbers[1]))
        else:
            sample(client, payload, num_items=int(numbers[0]))
        print(time.perf_counter() - started, flush=True)


def insert(client: reverb.Client, payload: np.ndarray, *, num_items: int, window: int) -> None:
    """Each payload is one step, one chunk and one item; at most `window` items are not confirmed at any time."""
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for _ in range(num_items):
            writer.append({"payload": payload})
            writer.create_item(TABLE, 1.0, {"payload": writer.history["payload"][-1:]})
            writer.flush(block_until_num_items=window - 1)
        writer.flush()


def sample(client: reverb.Client, payload: np.ndarray, *, num_items: int) -> None:
    """As arrays, one stream, in the order of insertion."""
    num_sampled = 0
    for item in client.sample(TABLE, num_samples=num_items, emit_timesteps=False):
        (array,) = item.data
        if array.nbytes != payload.nbytes:
            raise SystemExit(f"sampled {array.nbytes} bytes, {payload.nbytes} were inserted")
        num_sampled += 1
    if num_sampled != num_items:
        raise SystemExit(f"sampled {num_sampled} of {num_items}")


if __name__ == "__main__":
    main()
