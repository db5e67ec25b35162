"""The filter of system calls of a sandbox (seccomp, https://docs.kernel.org/userspace-api/).

It refuses system calls that take memory beyond a process's limit, also memory of the kernel, that make a user namespace
(which could then make mounts), that read or stop other processes, and that use interfaces of the kernel or the machine
other than files. The filter is a program of classic BPF, eight bytes an instruction. It takes at most a microsecond for
each system call.
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
    # Memory of the kernel, as much as is asked for, or pages that stay in pipes and sockets when they are unmapped.
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "inotify_init": (253, 26),  # aarch64 has only the newer
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "io_setup": (206, 0),
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
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
    # Its flags are in memory, which a filter cannot read. After ENOSYS the C library calls clone instead.
    "clone3": (435, 435),
}
# Programs know these errors, and do without: EPERM would end some.
ERRORS = {
    **dict.fromkeys(("setxattr", "lsetxattr", "fsetxattr", "setxattrat"), errno.EOPNOTSUPP),
    **dict.fromkeys(("memfd_create", "inotify_init", "inotify_init1", "fanotify_init", "io_setup"), errno.ENOSYS),
    **dict.fromkeys(("landlock_create_ruleset", "sendfile", "splice", "tee", "vmsplice", "clone3"), errno.ENOSYS),
    "seccomp": errno.EINVAL,
}
# Calls that are refused for some values of an argument: its place, the values, and the error (0: the call is ignored).
_REFUSED_VALUES: dict[str, tuple[tuple[int, int], int, tuple[int, ...], int]] = {
    # PR_SET_SECCOMP, PR_SET_THP_DISABLE, PR_FUTEX_HASH: the last takes as much memory as is asked for.
    "prctl": ((157, 167), 0, (22, 41, 78), errno.EINVAL),
    "fcntl": ((72, 25), 1, (1031,), errno.EPERM),  # F_SETPIPE_SZ
    # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_ATTACH_FILTER.
    "setsockopt": ((54, 208), 2, (7, 8, 32, 33, 26), 0),
}
_SOL_SOCKET = 1
_MMAP, _SHARED_ANONYMOUS, _PAGE_BYTES = (9, 222), (0x01, 0x20), 4096
_LISTEN = (50, 201)
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_CLONE_NEWUSER = 0x10000000
# Others can bypass the network namespace. AF_INET6 has lists of groups without a limit.
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_NETLINK": 16}
_FIRST_REFUSED_PROTOCOL = 33  # DCCP, SCTP, MPTCP and others have limits of their own; TCP is 6, UDP 17
_X32 = 0x40000000  # the bit that marks calls of the x32 table on x86_64

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16  # offsets in struct seccomp_data; the argument's lower half
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


@functools.cache
def program(max_backlog: int | None = None) -> bytes:
    """Return the filter for this machine. Raises ValueError if its architecture is not supported.

    With `max_backlog`, `listen` is refused for a longer queue of connections that wait.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"the sandbox's filter of system calls supports {' and '.join(ARCHITECTURES)}, not {machine!r}; run "
            "environments that need a sandbox on another machine"
        )
    return filter_of(machine, max_backlog)


@contextlib.contextmanager
def readable(max_backlog: int | None = None) -> Iterator[int]:
    """Yield a pipe's descriptor from which the filter for this machine can be read once."""
    reading, writing = os.pipe()
    try:
        os.write(writing, program(max_backlog))
        os.close(writing)
        yield reading
    finally:
        os.close(reading)


def filter_of(machine: str, max_backlog: int | None = None) -> bytes:
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
        lines += [_line(_EQUAL, numbers[column], skip_else=1), _refuse(ERRORS.get(name, errno.EPERM))]
    new_user = [_line(_LOAD, _ARGUMENT_AT), _line(_ANY_BIT, _CLONE_NEWUSER, skip_else=1), _refuse(errno.EPERM)]
    lines += _of_call(_CLONE[column], new_user)
    if max_backlog is not None:
        longer = [_line(_LOAD, _ARGUMENT_AT + 8), _line(_GREATER_EQUAL, max_backlog + 1, skip_else=1)]
        lines += _of_call(_LISTEN[column], [*longer, _refuse(errno.EPERM)])
    for name, (numbers, place, values, code) in _REFUSED_VALUES.items():
        lines += _of_call(
            numbers[column], [*(_of_level() if name == "setsockopt" else []), *_one_of(place, values, code)]
        )
    # The memory of a shared mapping stays as long as a part of it is mapped, which may be one page: so it has one page.
    shared = [_line(_LOAD, _ARGUMENT_AT + 8 * 3)]
    shared += [line for bit in _SHARED_ANONYMOUS for line in (_line(_ANY_BIT, bit, skip=1), _line(_RETURN, _ALLOW))]
    shared += [_line(_LOAD, _ARGUMENT_AT + 8), _line(_GREATER_EQUAL, _PAGE_BYTES + 1, skip=2)]
    shared += [_line(_LOAD, _ARGUMENT_AT + 12), _line(_EQUAL, 0, skip=1), _refuse(errno.ENOMEM)]
    lines += _of_call(_MMAP[column], shared)
    for numbers in (_SOCKET, _SOCKETPAIR):
        known = [_line(_EQUAL, family, skip=len(FAMILIES) - n) for n, family in enumerate(FAMILIES.values())]
        other = [_line(_LOAD, _ARGUMENT_AT + 8 * 2), _line(_GREATER_EQUAL, _FIRST_REFUSED_PROTOCOL, skip_else=1)]
        other.append(_refuse(errno.EPROTONOSUPPORT))
        lines += _of_call(numbers[column], [_line(_LOAD, _ARGUMENT_AT), *known, _refuse(errno.EAFNOSUPPORT), *other])
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _of_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Return `lines` for the call `number` only, and an end that allows it."""
    return [_line(_EQUAL, number, skip_else=len(lines) + 1), *lines, _line(_RETURN, _ALLOW)]


def _of_level() -> list[bytes]:
    return [_line(_LOAD, _ARGUMENT_AT + 8), _line(_EQUAL, _SOL_SOCKET, skip=1), _line(_RETURN, _ALLOW)]


def _one_of(place: int, values: tuple[int, ...], code: int) -> list[bytes]:
    """Return the lines that refuse a call whose argument at `place` is one of `values`."""
    found = [line for value in values for line in (_line(_EQUAL, value, skip_else=1), _refuse(code))]
    return [_line(_LOAD, _ARGUMENT_AT + 8 * place), *found]


def _line(code: int, value: int, *, skip: int = 0, skip_else: int = 0) -> bytes:
    """Return one instruction. A comparison skips `skip` instructions if it is true, and `skip_else` if not."""
    return struct.pack("=HBBI", code, skip, skip_else, value)


def _refuse(code: int) -> bytes:
    return _line(_RETURN, _ERRNO | code)
