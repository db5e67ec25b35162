"""The filter of system calls of a sandbox (seccomp, https://docs.kernel.org/userspace-api/).

It refuses system calls that take memory beyond a process's limit, that make a user namespace (which could then make
mounts), that read or stop other processes, and that use interfaces of the kernel or the machine other than files. The
filter is a program of classic BPF, eight bytes an instruction. It takes at most a microsecond for each system call.
"""

import contextlib
import errno
import functools
import os
import platform
import struct
from collections.abc import Iterator

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7  # AUDIT_ARCH_*
ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}

# By name: the numbers on x86_64 and on aarch64, from the kernel's tables.
REFUSED: dict[str, tuple[int, int]] = {
    # Memory outside any process: neither the limit of address space nor the size of a tmpfs bounds it.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Kernel interfaces with a history of vulnerabilities, which no task needs.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    # Other processes: those of the sandbox itself run as the same user.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_CLONE_NEWUSER = 0x10000000
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}  # others can bypass the network namespace
_X32 = 0x40000000  # the bit that marks calls of the x32 table on x86_64

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data; the argument's lower half
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


@functools.cache
def program() -> bytes:
    """Return the filter for this machine. Raises ValueError if its architecture is not supported."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"the sandbox's filter of system calls supports {' and '.join(ARCHITECTURES)}, not {machine!r}; run "
            "environments that need a sandbox on another machine"
        )
    return filter_of(machine)


@contextlib.contextmanager
def readable() -> Iterator[int]:
    """Yield a pipe's descriptor from which the filter for this machine can be read once."""
    reading, writing = os.pipe()
    try:
        os.write(writing, program())
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def filter_of(machine: str) -> bytes:
    """Return the filter for `machine`."""
    column = list(ARCHITECTURES).index(machine)
    lines = [
        _line(_LOAD, _ARCHITECTURE_AT),
        _line(_EQUAL, ARCHITECTURES[machine], skip=1),
        _refuse(errno.ENOSYS),  # a program of another architecture, such as a 32-bit one
        _line(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [_line(_GREATER_EQUAL, _X32, skip_else=1), _refuse(errno.ENOSYS)]
    for name, numbers in REFUSED.items():
        # The error of a kernel without memfd_create, which programs can handle.
        code = errno.ENOSYS if name == "memfd_create" else errno.EPERM
        lines += [_line(_EQUAL, numbers[column], skip_else=1), _refuse(code)]
    # A filter cannot read clone3's flags, which are in memory. After ENOSYS the C library calls clone instead.
    lines += [_line(_EQUAL, _CLONE3[column], skip_else=1), _refuse(errno.ENOSYS)]
    lines += [
        _line(_EQUAL, _CLONE[column], skip_else=3),
        _line(_LOAD, _ARGUMENT_AT),
        _line(_ANY_BIT, _CLONE_NEWUSER, skip_else=len(FAMILIES) + 4),
        _refuse(errno.EPERM),
    ]
    lines += [_line(_EQUAL, _SOCKET[column], skip_else=len(FAMILIES) + 2), _line(_LOAD, _ARGUMENT_AT)]
    lines += [_line(_EQUAL, family, skip=len(FAMILIES) - place) for place, family in enumerate(FAMILIES.values())]
    lines += [_refuse(errno.EAFNOSUPPORT), _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def _line(code: int, value: int, *, skip: int = 0, skip_else: int = 0) -> bytes:
    """Return one instruction. A comparison skips `skip` instructions if it is true, and `skip_else` if not."""
    return struct.pack("=HBBI", code, skip, skip_else, value)


def _refuse(code: int) -> bytes:
    return _line(_RETURN, _ERRNO | code)
