"""A line between two network namespaces that delays and loses IP packets, as a kernel's netem would.

Each end is a TUN device of its namespace. What one kernel sends through it is read here, and written to the other one
later or never: so TCP's own retransmissions and its congestion control do what they do on such a line.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Self

TUN = Path("/dev/net/tun")
SET_DEVICE = 0x400454CA  # TUNSETIFF
TUN_WITHOUT_HEADER = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
# Reno halves its rate with each loss, as cubic, Linux's default, nearly does on such a line; BBR would ignore them.
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
MAX_PACKET_BYTES = 1 << 16
QUEUED_PACKETS = 1000  # in each direction; a router drops what is more
START_TIMEOUT_S = 60.0
FAR, NEAR = "10.77.0.1", "10.77.0.2"
DELAY_S = 0.025  # of each packet, in each direction
LOSS = 0.02  # of all packets


class LossyLine:
    """One line. Any thread may set its attributes."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        """Both ends hand over their device through a socket file in `folder`."""
        self.is_cut = False  # every packet is lost
        self.num_lost = 0  # without those of a line that is cut
        self.num_bytes = {FAR: 0, NEAR: 0}  # that arrived, by receiver
        self._chance = random.Random(seed)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "line"))
        self._listening.listen()
        self._listening.settimeout(START_TIMEOUT_S)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lossy-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        devices = dict(self._accepted() for _ in range(2))
        selector = selectors.DefaultSelector()
        for end, device in devices.items():
            selector.register(device, selectors.EVENT_READ, NEAR if end == FAR else FAR)
        on_the_way: list[tuple[float, int, str, bytes]] = []
        order = itertools.count()
        while not self._closing.is_set():
            wait_s = on_the_way[0][0] - time.monotonic() if on_the_way else 0.1
            for ready, _ in selector.select(max(0.0, min(0.1, wait_s))):
                with contextlib.suppress(OSError):  # the host is gone
                    packet = os.read(ready.fd, MAX_PACKET_BYTES)
                    if self._passes(packet) and len(on_the_way) < 2 * QUEUED_PACKETS:
                        due = time.monotonic() + DELAY_S
                        heapq.heappush(on_the_way, (due, next(order), ready.data, packet))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(on_the_way)
                with contextlib.suppress(OSError):
                    os.write(devices[receiver], packet)
                    self.num_bytes[receiver] += len(packet)
        for device in devices.values():
            os.close(device)

    def _accepted(self) -> tuple[str, int]:
        """One end, and its device. Ends the thread with an error if it does not come in time."""
        connection, _ = self._listening.accept()
        with connection:
            end, devices, _, _ = socket.recv_fds(connection, 64, 1)
        return end.decode(), devices[0]

    def _passes(self, packet: bytes) -> bool:
        if self.is_cut or packet[0] >> 4 != 4:  # IPv6 announces itself on every device
            return False
        is_lost = self._chance.random() < LOSS
        self.num_lost += is_lost
        return not is_lost


def hand_over(folder: Path, address: str) -> None:
    """In a namespace: make its end of the line, and hand it over. Raises OSError without CAP_NET_ADMIN or TUN."""
    device = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH", b"line", TUN_WITHOUT_HEADER))
    CONGESTION.write_text("reno")
    for command in (["addr", "add", f"{address}/24", "dev", "line"], ["link", "set", "line", "up"]):
        subprocess.run(["ip", *command], check=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "line"))
        socket.send_fds(connection, [address.encode()], [device])
    os.close(device)  # the other process keeps it open
