"""What a border may be sent that it did not ask for: the same sequence for the same seed."""

import random
import socket
import struct
from collections.abc import Iterator, Sequence

NOT_UTF8 = b"\x81\xa4root\xd9\x2c" + b"\xff\xfe" * 22  # MessagePack of a text whose 44 bytes are no text: 51 in all

# What a decoder may stumble over: containers and strings that claim 4e9 elements, timestamps, NaN, no type at all.
MARKERS = [
    *(kind + b"\xff" * 4 for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
    *(kind + b"\xff\xff" for kind in (b"\xdc", b"\xde")),
]
MARKERS += [b"\x9f", b"\x8f", b"\xc1", b"\xc0", b"\xd7\xff" + bytes(8), b"\xcb\x7f\xf8" + bytes(6)]
MARKERS += [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xc9\xff\xff\xff\xff\x01"]
SHAPES = [*MARKERS, b"", b"\x90", b"\x80", b"\x81\xa4type\xa0", b"\x81\xa4type\x01", b"\x81\x01\x02"]
SHAPES += [b"\x93\x01\x02\x03", b"\x91" * 4000, b"\x81\xa1a" * 1300, NOT_UTF8, b"\xa9not a map"]
SHAPES += [b'{"model": "policy"}', b'{"model": "\xff\xfe"}', b"[" * 4000, b"\x00", b"\xff" * 50]


def garbage(seed: int, count: int, *, sound: Sequence[bytes]) -> Iterator[bytes]:
    """All of SHAPES, then `count` messages: random bytes, two of the `sound` ones joined, and damaged ones."""
    chance = random.Random(seed)
    yield from SHAPES
    for number in range(count):
        whole, other = chance.choice(sound), chance.choice(sound)
        match number % 5:
            case 0:
                yield chance.randbytes(chance.randrange(1, 200))
            case 1:
                yield whole + other
            case _:
                yield damaged(whole, chance, other=other)


def damaged(data: bytes, chance: random.Random, *, other: bytes) -> bytes:
    """`data` with a byte or a part changed, left out, repeated or replaced, maybe by a part of `other`; or cut off."""
    place = chance.randrange(len(data) + 1)
    until = min(len(data), place + chance.choice((1, 1, 2, 4, 16, 64)))
    start = chance.randrange(len(other))
    match chance.randrange(7):
        case 0:
            return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
        case 1:
            return data[:place] + data[until:]
        case 2:
            return data[:until] + data[place:until] * chance.choice((1, 2, 50)) + data[until:]
        case 3:
            return data[:place] + chance.choice(MARKERS) + data[until:]
        case 4:
            return data[:place] + other[start : start + 64] + data[until:]
        case 5:
            return data[:place] + chance.randbytes(chance.randrange(1, 64)) + data[until:]
        case _:
            return data[:place]


def shout(host: str, port: int, data: bytes) -> None:
    """Connect, say `data`, and leave without waiting for an answer."""
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def shouts(seed: int) -> Iterator[bytes]:
    """What a port may hear that speaks another protocol: of ZeroMQ's greeting, of HTTP, of none."""
    chance = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    yield from (b"", b"GET / HTTP/1.0\r\n\r\n", greeting, greeting[:20], greeting + b"\x06" + b"\xff" * 60)
    yield from (greeting + chance.randbytes(64) for _ in range(10))
    yield from (chance.randbytes(chance.randrange(1, 4096)) for _ in range(10))
