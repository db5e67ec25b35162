"""Reverb's side of `make bench-replay`. It runs only in a separate Python environment (requirements/reverb.txt).

`serve` prints its port and serves until its standard input closes. `drive PORT FILE` reads the commands `insert N
WINDOW`, `sample N` and `dataset N WINDOW` from its standard input, one per line. It executes each with the bytes of
FILE, and prints the seconds.
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
        drive(f"localhost:{sys.argv[2]}", np.frombuffer(Path(sys.argv[3]).read_bytes(), np.uint8))


def serve() -> None:
    # A queue in which every item is sampled once, and then removed, as in our buffer.
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


def drive(address: str, payload: np.ndarray) -> None:
    client = reverb.Client(address)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        num_items, *window = map(int, numbers)
        match verb:
            case "insert":
                seconds = insert(client, payload, num_items=num_items, window=window[0])
            case "sample":
                seconds = sample(client, payload, num_items=num_items)
            case _:
                seconds = sample_dataset(address, payload, num_items=num_items, window=window[0])
        print(seconds, flush=True)


def insert(client: reverb.Client, payload: np.ndarray, *, num_items: int, window: int) -> float:
    """Insert each payload as one step, one chunk and one item, with at most `window` items unconfirmed."""
    started = time.perf_counter()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for _ in range(num_items):
            writer.append({"payload": payload})
            writer.create_item(TABLE, 1.0, {"payload": writer.history["payload"][-1:]})
            writer.flush(block_until_num_items=window - 1)
        writer.flush()
    return time.perf_counter() - started


def sample(client: reverb.Client, payload: np.ndarray, *, num_items: int) -> float:
    """Sample arrays one at a time by `Client.sample`, which needs no TensorFlow; Reverb advises against it."""
    started = time.perf_counter()
    for item in client.sample(TABLE, num_samples=num_items, emit_timesteps=False):
        check(item.data[0], payload)
    return time.perf_counter() - started


def sample_dataset(address: str, payload: np.ndarray, *, num_items: int, window: int) -> float:
    """Sample by `TrajectoryDataset`, which Reverb recommends, with `window` samples in flight.

    The time counts from the first item, as a learner creates the iterator of the dataset only once.
    """
    import tensorflow as tf

    dataset = reverb.TrajectoryDataset(
        server_address=address,
        table=TABLE,
        dtypes=[tf.uint8],
        shapes=[tf.TensorShape([1, payload.nbytes])],
        max_in_flight_samples_per_worker=window,
        num_workers_per_iterator=1,  # a queue's order needs one
    )
    items = dataset.take(num_items).as_numpy_iterator()
    check(next(items).data[0], payload)
    started = time.perf_counter()
    for item in items:
        check(item.data[0], payload)
    return (time.perf_counter() - started) * num_items / (num_items - 1)


def check(array: np.ndarray, payload: np.ndarray) -> None:
    if array.nbytes != payload.nbytes:
        raise SystemExit(f"sampled {array.nbytes} bytes, but {payload.nbytes} were inserted")


if __name__ == "__main__":
    main()
