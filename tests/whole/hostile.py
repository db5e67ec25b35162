"""Bytes that mean harm, and a process that swallows them and says what that cost.

    python -m tests.whole.hostile fuzz SEED COUNT    mutated frames of every record that travels
    python -m tests.whole.hostile bomb FILE...       one frame in each, as a trajectory
    python -m tests.whole.hostile claim URL RUN COUNT    that many groups, out of a buffer

It prints one JSON object, with `grown_kib`: the most that it ever held, above what it held before the first byte.
"""

import io
import itertools
import json
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zstandard

from slipstream.common.process.connection import connect
from slipstream.common.process.wire import SCHEMA, WireError, decode, encode
from slipstream.common.records.trajectory import MAX_TRAJECTORY_BYTES, InvalidTrajectory, Trajectory, check
from slipstream.common.transfer.chunks import Blob, ChunkReply, ChunkRequest, ChunkStatus
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import Adapted, Anchor, Delta, Invitation, Manifest, Offer, TensorEntry
from slipstream.replay.fleet.fleet import Refusal
from slipstream.replay.records.failures import Failure, Quarantined
from tests.common.records.test_trajectory import VOCAB_SIZE, WHOLE
from tests.garbage import damaged
from tests.replay.buffer.every_verb import FACTS, MEMBER, RELAY
from tests.replay.records.attempts import make_buffer, ticket

ROOM = MAX_TRAJECTORY_BYTES - 4096  # what a bomb fills of a frame
PLAIN, ZSTD = 0, 1

TENSOR = TensorEntry(name="a", dtype="float32", shape=[2, 3], offset=0, num_bytes=24, xxh3=1 << 63)
MANIFEST = Manifest(
    **{"policy_version": 7, "learner_epoch": 1, "tensors": [TENSOR, TENSOR], "num_bytes": 128, "root": "root"},
    adapted=Adapted(root="folder", scaling=2.0),
    probe=Probe(tokens=[1, 2], logprobs=[-0.5], tolerance=0.1),
    anchor=Anchor(root="anchor", xxh3=[1, 2]),
    deltas=[Delta(base="anchor", blob=Blob(root="delta", num_bytes=9))],
)
INVITATION = Invitation(number=1, actors=["a", "b"])
RECORDS: list[msgspec.Struct] = [
    WHOLE,
    ticket(3),
    Failure(group_id=1, member=0, attempt=2, outcome="env_failure", reason="why"),
    Quarantined(group_id=1, member=0, actor="a", reason="why"),
    Offer(manifest=MANIFEST, pull_endpoint="tcp://127.0.0.1:1", invitation=INVITATION),
    ChunkRequest(root="root", offset=0, num_bytes=1 << 20),
    ChunkReply(root="root", offset=0, answer=ChunkStatus.HERE, xxh3=1 << 63),
    RELAY,
    FACTS,
    msgspec.structs.replace(MEMBER, refusal=Refusal(policy_version=4, reason="why", unfit=True)),
]


def frame(body: bytes, *, codec: int = PLAIN, declared: int | None = None) -> bytes:
    return struct.pack("<2sBBI", b"SL", SCHEMA, codec, len(body) if declared is None else declared) + body


def with_field(name: str, value: bytes) -> bytes:
    fields = {field: getattr(WHOLE, field) for field in WHOLE.__struct_fields__}
    return frame(msgspec.msgpack.encode(fields | {name: msgspec.Raw(value)}))


def array_of(element: bytes) -> bytes:
    """As many elements as there is room for."""
    num_elements = ROOM // len(element)
    return b"\xdd" + struct.pack(">I", num_elements) + element * num_elements


def turn_with_rewards(rewards: bytes) -> bytes:
    turn = {name: getattr(WHOLE.turns[0], name) for name in WHOLE.turns[0].__struct_fields__}
    return b"\x91" + msgspec.msgpack.encode(turn | {"rewards": msgspec.Raw(rewards)})


def map_of_rewards() -> bytes:
    """A name of four letters for each of more than a million rewards: 180 MiB of Python in 8 MiB."""
    num_rewards = ROOM // 6
    names = (bytes(letters) for letters in itertools.product(range(33, 123), repeat=4))
    pairs = b"".join(b"\xa4" + name + b"\x00" for name in itertools.islice(names, num_rewards))
    return b"\xdf" + struct.pack(">I", num_rewards) + pairs


def zstd_of_nothing(num_bytes: int, *, declared: int) -> bytes:
    bomb = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(bomb, closefd=False) as writer:
        for _ in range(num_bytes >> 20):
            writer.write(bytes(1 << 20))
    return frame(bomb.getvalue(), codec=ZSTD, declared=declared)


BOMBS: dict[str, Callable[[], bytes]] = {
    "empty arrays in an array": lambda: with_field("turns", array_of(b"\x90")),
    "small integers in a list": lambda: with_field("branch_starts", array_of(b"\x00")),
    "integers in a list": lambda: with_field("branch_starts", array_of(b"\xcd\x12\x34")),
    "version spans": lambda: with_field(
        "version_spans", array_of(msgspec.msgpack.encode({"start": 0, "stop": 1, "policy_version": 0}))
    ),
    "rewards in a map": lambda: with_field("turns", turn_with_rewards(map_of_rewards())),
    "an array that claims four billion": lambda: with_field("turns", b"\xdd\xff\xff\xff\xff"),
    "a map that claims four billion": lambda: with_field("turns", turn_with_rewards(b"\xdf\xff\xff\xff\xff")),
    "bytes that claim four billion": lambda: with_field("tokens", b"\xc6\xff\xff\xff\xff"),
    "a hundred thousand arrays deep": lambda: with_field("turns", b"\x91" * 100_000 + b"\xc0"),
    "a hundred thousand maps deep": lambda: with_field("turns", turn_with_rewards(b"\x81\xa1a" * 100_000 + b"\x00")),
    "an unknown field that is large": lambda: frame(b"\x81\xa7unknown" + array_of(b"\x90")),
    "a gibibyte in zstd, a little declared": lambda: zstd_of_nothing(1 << 30, declared=1000),
    "a gibibyte in zstd, all that is allowed declared": lambda: zstd_of_nothing(1 << 30, declared=MAX_TRAJECTORY_BYTES),
    "a gibibyte in zstd, declared": lambda: zstd_of_nothing(1 << 30, declared=1 << 30),
    "larger than is allowed": lambda: frame(bytes(MAX_TRAJECTORY_BYTES + 1)),
}


def mutations(seed: int, count: int) -> Iterator[tuple[type[msgspec.Struct], bytes]]:
    """Frames of every record, each damaged once or a few times."""
    chance = random.Random(seed)
    whole = [(type(record), encode(record, compress=compress)) for record in RECORDS for compress in (False, True)]
    for _ in range(count):
        kind, data = chance.choice(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            data = damaged(data, chance, other=chance.choice(whole)[1])
        if chance.random() < 0.7 and len(data) >= 8:  # past the header's own check
            data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
        yield kind, data


def refusal_of(kind: type[msgspec.Struct], data: bytes) -> str | None:
    """Why a frame is refused; None for one that is a sound record. Anything else that is raised is a hole."""
    try:
        record = decode(kind, data, max_bytes=MAX_TRAJECTORY_BYTES)
        if isinstance(record, Trajectory):
            check(record, vocab_size=VOCAB_SIZE)
    except (WireError, InvalidTrajectory) as error:
        return str(error)
    return None


def fuzz(seed: int, count: int) -> dict[str, object]:
    num_refused, slowest_s, longest_chars = 0, 0.0, 0
    for kind, data in mutations(seed, count):
        started = time.perf_counter()
        refusal = refusal_of(kind, data)
        slowest_s = max(slowest_s, time.perf_counter() - started)
        num_refused += refusal is not None
        longest_chars = max(longest_chars, len(refusal or ""))
    return {"num_refused": num_refused, "slowest_s": slowest_s, "longest_chars": longest_chars}


def bombs(files: list[str]) -> dict[str, object]:
    refusals, slowest_s = [], 0.0
    for file in files:
        data = Path(file).read_bytes()
        started = time.perf_counter()
        refusals.append(refusal_of(Trajectory, data))
        slowest_s = max(slowest_s, time.perf_counter() - started)
    return {"refusals": refusals, "slowest_s": slowest_s}


def claim(url: str, run_id: str, count: int) -> dict[str, object]:
    with connect(url) as client:
        buffer = make_buffer(client, run_id)
        buffer.learner.acquire_epoch()
        started = time.perf_counter()
        groups = buffer.learner.claim(1, count, policy_version=0, max_lag=100)
        return {"num_claimed": len(groups), "slowest_s": time.perf_counter() - started}


def held_kib(line: str) -> int:
    """VmRSS is what this process holds, VmHWM the most that it ever held."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    before_kib = held_kib("VmRSS")
    if verb == "fuzz":
        result = fuzz(int(arguments[0]), int(arguments[1]))
    elif verb == "bomb":
        result = bombs(arguments)
    else:
        result = claim(arguments[0], arguments[1], int(arguments[2]))
    print(json.dumps(result | {"grown_kib": held_kib("VmHWM") - before_kib}))
