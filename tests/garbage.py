"""What a border may be sent that it did not ask for: the same sequence for the same seed."""

import random
import socket
import struct
from collections.abc import Iterator, Sequence

NOT_UTF8 = b"\x81\xa4root\xd9\x2c" + b"\xff\xfe" * 22  # MessagePack of a text whose 44 bytes are no text: 51 in all

# Sound MessagePack of the wrong shape, and what claims more than there is.
SHAPES = [
    b"",
    b"\xc0",
    b"\x90",
    b"\x80",
    b"\x81\xa4type\xa0",
    b"\x81\xa4type\x01",
    b"\x81\x01\x02",
    b"\x93\x01\x02\x03",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",
    b"\xd7\xff" + bytes(8),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\x91" * 4000,
    b"\x81\xa1a" * 1300,
    NOT_UTF8,
    b"\xa9not a map",
    b'{"model": "policy"}',
    b'{"model": "\xff\xfe"}',
    b"[" * 4000,
    b"\x00",
    b"\xff" * 50,
]


def garbage(seed: int, count: int, *, sound: Sequence[bytes]) -> Iterator[bytes]:
    """All of SHAPES, then `count` messages: random bytes, and `sound` ones that are cut off, damaged or joined."""
    chance = random.Random(seed)
    yield from SHAPES
    for number in range(count):
        whole, other = chance.choice(sound), chance.choice(sound)
        place = chance.randrange(len(whole))
        match number % 5:
            case 0:
                yield chance.randbytes(chance.randrange(1, 200))
            case 1:
                yield whole[:place]
            case 2:
                yield whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
            case 3:
                yield whole[:place] + chance.choice(SHAPES) + whole[place:]
            case _:
                yield whole + other


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
