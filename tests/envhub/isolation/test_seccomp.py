"""The system calls that the sandbox refuses."""

import errno
import json
import platform
import shlex
import struct

import pytest

from slipstream.envhub.isolation import seccomp
from tests.envhub.isolation.sandboxed import run

CALLS = """
import ctypes, errno, json, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def answer(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
    if result == 0 and arguments and arguments[0] & 0x10000000:
        sys.exit(0)  # the child of a clone
    return errno.errorcode.get(ctypes.get_errno(), "done")
print(json.dumps({name: answer(*call) for name, call in json.loads(sys.argv[1]).items()}))
"""
COLUMN = list(seccomp.ARCHITECTURES).index(platform.machine())
NEW_USER = 0x10000000 | 17  # CLONE_NEWUSER | SIGCHLD


def answers(calls: dict[str, tuple[int, ...]]) -> dict[str, str]:
    said = run(f"python3 -c {shlex.quote(CALLS)} {shlex.quote(json.dumps(calls))}").output
    return dict(json.loads(said))


def test_every_system_call_that_is_to_be_refused_is_refused() -> None:
    calls = {name: (numbers[COLUMN], 0, 0, 0, 0) for name, numbers in seccomp.REFUSED.items()}
    said = answers(calls)
    expected = {name: errno.errorcode[seccomp.ERRORS.get(name, errno.EPERM)] for name in said}
    assert said == expected and len(said) > 40
    clone, clone3 = (numbers[COLUMN] for numbers in ((56, 220), (435, 435)))
    said = answers({"clone": (clone, NEW_USER, 0, 0, 0, 0), "clone3": (clone3, 0, 0)})
    assert said == {"clone": "EPERM", "clone3": "ENOSYS"}


def test_calls_are_refused_for_the_arguments_that_take_the_kernels_memory_and_done_for_others() -> None:
    prctl, fcntl, mmap = ((157, 167)[COLUMN], (72, 25)[COLUMN], (9, 222)[COLUMN])
    calls: dict[str, tuple[tuple[int, ...], str]] = {
        "seccomp": ((prctl, 22, 2, 0), "EINVAL"),
        "huge pages": ((prctl, 41, 0, 0, 0, 0), "EINVAL"),
        "futexes": ((prctl, 78, 1, 16, 0), "EINVAL"),
        "name": ((prctl, 38, 1, 0, 0, 0), "done"),
        "size": ((fcntl, 1, 1031, 1 << 20), "EPERM"),
        "flags": ((fcntl, 1, 3), "done"),
        "shared": ((mmap, 0, 8192, 3, 0x21, -1, 0), "ENOMEM"),
        "one page shared": ((mmap, 0, 4096, 3, 0x21, -1, 0), "done"),
        "private": ((mmap, 0, 8192, 3, 0x22, -1, 0), "done"),
    }
    said = answers({name: call for name, (call, _) in calls.items()})
    assert said == {name: answer for name, (_, answer) in calls.items()}


def test_only_unix_internet_and_netlink_sockets_can_be_made() -> None:
    """A virtual machine's own sockets, AF_VSOCK, are in no network namespace."""
    for call in ((41, 198), (53, 199)):
        said = answers({str(family): (call[COLUMN], family, 1, 0, 0) for family in range(1, 46)})
        assert said["40"] == "EAFNOSUPPORT"
        assert {int(family) for family, answer in said.items() if answer != "EAFNOSUPPORT"} <= {1, 2, 16}
    calls = {str(protocol): ((41, 198)[COLUMN], 2, kind, protocol) for kind, protocol in ((1, 6), (2, 17), (1, 262))}
    assert answers(calls) == {"6": "done", "17": "done", "262": "EPROTONOSUPPORT"}


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_the_filter_refuses_the_same_on_every_architecture(machine: str) -> None:
    """By its instructions, as the kernel would run them."""
    column, allowed = list(seccomp.ARCHITECTURES).index(machine), 0x7FFF0000
    for numbers in seccomp.REFUSED.values():
        assert _verdict(machine, numbers[column]) != allowed
    clone, socket_call = (56, 220)[column], (41, 198)[column]
    assert _verdict(machine, clone, NEW_USER) != allowed == _verdict(machine, clone, 17)
    assert [family for family in range(50) if _verdict(machine, socket_call, family) == allowed] == [1, 2, 16]
    harmless = set(range(450)) - {numbers[column] for numbers in seccomp.REFUSED.values()}
    assert {_verdict(machine, number, 1) for number in harmless} == {allowed}
    assert _verdict(machine, 1, architecture=0x40000003) != allowed  # of 32 bits
    if machine == "x86_64":
        assert _verdict(machine, 0x40000001) != allowed


def _verdict(machine: str, number: int, argument: int = 0, *, architecture: int | None = None) -> int:
    program = list(struct.iter_unpack("=HBBI", seccomp.filter_of(machine)))
    data = {0: number, 4: architecture or seccomp.ARCHITECTURES[machine], 16: argument, 24: 0, 32: 0, 40: 0}
    at = loaded = 0
    while True:
        code, skip, skip_else, value = program[at]
        if code == 0x06:
            return int(value)
        if code == 0x20:
            loaded, at = data[value], at + 1
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += 1 + (skip if holds else skip_else)
