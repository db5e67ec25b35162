"""What a command can take of the kernel's memory, measured from outside, and that ordinary programs still work."""

import asyncio
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.envhub.isolation import sandbox
from slipstream.envhub.isolation.sandbox import Limits, run_in_sandbox
from tests.envhub.isolation.sandboxed import run

MIB = 1 << 20
MOST_MIB = 128.0
LIMITS = Limits(wall_s=4.0, max_processes=4, memory_bytes=256 * MIB)
PRELUDE = """
import array, contextlib, ctypes, fcntl, itertools, mmap, os, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
numbers = itertools.count()
kept = []
def called(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def listen(server):
    for backlog in 4096, 1:  # the second where the filter refuses a long queue
        with contextlib.suppress(PermissionError):
            return server.listen(backlog)
    raise OSError
def filled(one):
    one.setblocking(False)
    for size in (100_000, 1000, 1):
        with contextlib.suppress(OSError):
            while True:
                one.send(bytes(size))
    return one
"""
HOLD = """
for _ in range(processes - 1):
    if os.fork() == 0:
        break
own = os.getpid()
with contextlib.suppress(OSError, MemoryError, ValueError):
    while True:
        attack()
print("held", flush=True)
time.sleep(0.5)
"""

# What each does again and again, in every process of a run, until it is refused.
ATTACKS = {
    "attributes of files": """
        os.close(os.open(name := f'/tmp/{own}-{next(numbers)}', os.O_CREAT))
        os.setxattr(name, 'user.x', bytes(60_000))""",
    "an attribute of one file": """
        os.close(os.open(f'/tmp/{own}', os.O_CREAT))
        os.setxattr(f'/tmp/{own}', f'user.{next(numbers)}', bytes(60_000))""",
    "names of files": "os.close(os.open(f'/tmp/{own}-{next(numbers)}', os.O_CREAT))",
    "names in shared memory": "os.close(os.open(f'/dev/shm/{own}-{next(numbers)}', os.O_CREAT))",
    "links": "os.symlink('x' * 4000, f'{own}-{next(numbers)}')",
    "pairs of sockets": "kept.extend(map(filled, socket.socketpair()))",
    "pairs of sockets with large buffers": """
        for one in socket.socketpair():
            one.setsockopt(1, socket.SO_SNDBUF, 4 << 20)
            kept.append(filled(one))""",
    "sockets that wait": """
        kept.append(server := socket.socket(socket.AF_UNIX))
        server.bind(f'\\0{own}-{next(numbers)}')
        listen(server)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = socket.socket(socket.AF_UNIX)
                client.setblocking(False)
                client.connect(server.getsockname())
                filled(client).close()""",
    "sockets that wait for TCP": """
        kept.append(server := socket.socket())
        server.bind(('127.0.0.1', 0))
        listen(server)
        with contextlib.suppress(TimeoutError):
            while True:
                client = socket.create_connection(server.getsockname(), timeout=0.2)
                filled(client).close()""",
    "sockets that talk to themselves by TCP": """
        kept.append(one := socket.socket())
        one.bind(('127.0.0.1', 0))
        one.connect(one.getsockname())
        filled(one)""",
    "datagrams": """
        kept.extend((one := socket.socket(type=socket.SOCK_DGRAM), other := socket.socket(type=socket.SOCK_DGRAM)))
        one.bind(('127.0.0.1', 0))
        other.connect(one.getsockname())
        for _ in range(1000):
            other.send(bytes(60_000))""",
    "sockets in flight": """
        one, other = socket.socketpair()
        kept.append(filled(one)), filled(other)
        carrier, end = socket.socketpair()
        socket.send_fds(carrier, [b'x'], [one.fileno(), other.fileno(), end.fileno()])
        kept.pop().close(), other.close(), end.close(), kept.append(carrier)""",
    "filters of sockets": """
        kept.append(one := socket.socket(socket.AF_UNIX))
        program = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0) * 4096)
        one.setsockopt(1, 26, struct.pack('HxxxxxxQ', 4096, ctypes.addressof(program)))""",
    "pipes": """
        kept.append(ends := os.pipe())
        with contextlib.suppress(OSError):
            fcntl.fcntl(ends[1], 1031, 1 << 20)
        os.set_blocking(ends[1], False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(ends[1], bytes(4096))""",
    "huge pages in pipes": """
        ends = os.pipe()
        memory = mmap.mmap(-1, 16 << 20, flags=34)
        memory.madvise(14)
        memory[:] = bytes(1) * (16 << 20)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for at in range(0, 16 << 20, 2 << 20):
            pointer = struct.pack('QQ', (start + (2 << 20) - 1) // (2 << 20) * (2 << 20) + at, 1)
            called(278, ends[1], pointer, 1, 0)
        libc.munmap(ctypes.c_void_p(start), 16 << 20)
        kept.append((ends, memory))""",
    "pages of files in sockets": """
        kept.append(pair := socket.socketpair())
        pair[0].setblocking(False)
        file = os.open(f'/tmp/{own}', os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.pwrite(file, bytes(65536), 0)
                for page in range(16):
                    os.sendfile(pair[0].fileno(), file, page * 4096, 1)
                os.ftruncate(file, 0)
        os.close(file)""",
    "locks": """
        file = os.open(f'/tmp/{own}-{next(numbers)}', os.O_CREAT | os.O_RDWR)
        for at in range(20_000, 0, -2):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, at)""",
    "epolls": """
        polls = [select.epoll() for _ in range(28)]
        pipes = [os.pipe() for _ in range(14)]
        for spare in range(1000, 10**6):
            for ends in pipes:
                for end in ends:
                    for poll in polls:
                        poll.register(end)
            kept.append((polls, pipes))
            raise OSError""",
    "events of inotify": """
        if not kept:
            one = called(294, 0)
            libc.inotify_add_watch(one, f'/tmp'.encode(), 0xfff)
            kept.append(one)
        for _ in range(8):
            called(294, 0) and libc.inotify_add_watch(one + 1 + _, b'/tmp', 0xfff)
        for number in range(20_000):
            name = f'/tmp/{own}' + 'x' * (100 + number % 100)
            os.close(os.open(name, 64))
            os.unlink(name)""",
    "rings of events": """
        context = ctypes.c_ulong(0)
        called(206, 4096, ctypes.addressof(context))""",
    "signals": """
        signal.pthread_sigmask(signal.SIG_BLOCK, [40])
        if libc.sigqueue(os.getpid(), 40, None):
            raise OSError""",
    "timers": """
        if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())):
            raise OSError""",
    "terminals": """
        kept.append(ends := os.openpty())
        for end in ends:
            os.set_blocking(end, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(end, b'x' * 4096)""",
    "shared memory that is unmapped in part": """
        memory = libc.mmap(None, 16 << 20, 3, 0x21, -1, 0)
        if memory == (1 << 64) - 1:
            raise OSError
        libc.memset(ctypes.c_void_p(memory), 1, 16 << 20)
        libc.munmap(ctypes.c_void_p(memory + 4096), (16 << 20) - 4096)""",
    "shared zeros that are unmapped in part": """
        device = os.open('/dev/zero', os.O_RDWR)
        memory = libc.mmap(None, 16 << 20, 3, 1, device, 0)
        os.close(device)
        if memory == (1 << 64) - 1:
            raise OSError
        libc.memset(ctypes.c_void_p(memory), 1, 16 << 20)
        libc.munmap(ctypes.c_void_p(memory + 4096), (16 << 20) - 4096)""",
    "huge pages that are unmapped in part": """
        if next(numbers) == 16: raise OSError  # of 8, the kernel would keep as much as is allowed
        memory = libc.mmap(None, 16 << 20, 3, 0x22, -1, 0)
        if memory == (1 << 64) - 1:
            raise OSError
        libc.madvise(ctypes.c_void_p(memory), 16 << 20, 14)
        libc.memset(ctypes.c_void_p(memory), 1, 16 << 20)
        for at in range(0, 16 << 20, 2 << 20):
            libc.munmap(ctypes.c_void_p(memory + at + 4096), (2 << 20) - 4096)""",
    "a table of futexes": """
        if libc.prctl(78, 1, 1 << 21, 0, 0):
            raise OSError""",
    "filters of system calls": """
        program = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000) * 4000)
        packed = struct.pack('HxxxxxxQ', 4000, ctypes.addressof(program))
        if libc.prctl(22, 2, packed):
            raise OSError""",
    "rules of landlock": """
        kept.append(one := called(444, struct.pack('QQ', 0, 1), 16, 0))
        for port in range(65536):
            called(445, one, 2, struct.pack('QQ', 1, port), 0)""",
    "mappings": """
        memory = libc.mmap(None, 32 << 20, 0, 0x22, -1, 0)
        for at in range(0, 32 << 20, 8192):
            if libc.mprotect(ctypes.c_void_p(memory + at), 4096, 1):
                raise OSError""",
    "groups of addresses": """
        kept.append(one := socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        for _ in range(300):
            address = struct.pack('>QQ', 0xff02 << 48, next(numbers) + (own << 32)) + struct.pack('I', 1)
            one.setsockopt(41, 20, address)""",
}


def kernel_mib() -> float:
    """The kernel's own memory, and that of files in memory: all that is neither free, of a program nor of a disk."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name.rstrip(":"): int(number) for name, number, *_ in lines}
    others = ("MemFree", "Buffers", "Cached", "AnonPages", "SReclaimable")
    return (kib["MemTotal"] + kib["Shmem"] - sum(kib[name] for name in others)) / 1024


async def growth_mib(attack: str, most_mib: float, *, limits: Limits = LIMITS) -> float:
    """The kernel's memory that a run takes at most. It is ended when it has taken more than `most_mib`."""
    body = textwrap.indent(textwrap.dedent(attack).strip(), "    ")
    program = f"{PRELUDE}\nprocesses = {limits.max_processes - 2}\ndef attack():\n{body}\n{HOLD}"
    before, most = kernel_mib(), 0.0
    turn = asyncio.ensure_future(run_in_sandbox(f"python3 -I -c {shlex.quote(program)}", {}, limits=limits))
    while not turn.done() and most <= most_mib:
        await asyncio.wait([turn], timeout=0.02)
        most = max(most, kernel_mib() - before)
    if not turn.done():
        turn.cancel()
        await asyncio.wait([turn])
    else:
        print(turn.result().output[-300:])
    return most


def is_bounded(name: str) -> None:
    """The least of three: other programs of this machine take memory of the kernel too."""
    for _ in range(3):
        if (grown := asyncio.run(growth_mib(ATTACKS[name], MOST_MIB))) < MOST_MIB:
            return
    pytest.fail(f"{grown:.0f} MiB")


@pytest.mark.parametrize("name", ATTACKS)
def test_the_kernels_memory_that_a_run_takes_is_bounded(name: str) -> None:
    is_bounded(name)


@pytest.fixture(params=["/proc/sys/net", "/proc/sys/missing"])
def unset(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that do not let the sandbox set the length of queues; the second lets it set no buffers either."""
    monkeypatch.setattr(sandbox, "_SOMAXCONN", "/proc/sys/net/missing")
    monkeypatch.setattr(sandbox, "SETUP", sandbox.SETUP.replace("/proc/sys/net", request.param))
    sandbox._limits_waiting.cache_clear()
    yield
    sandbox._limits_waiting.cache_clear()


@pytest.mark.parametrize("name", [name for name in ATTACKS if "sockets that" in name])  # have a queue, or use TCP
@pytest.mark.usefixtures("unset")
def test_sockets_are_bounded_where_the_kernel_does_not_let_the_sandbox_limit_them(name: str) -> None:
    is_bounded(name)


@pytest.mark.usefixtures("unset")
def test_a_longer_queue_than_the_kernel_can_limit_is_refused_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    command = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[2]); s.listen(int(sys.argv[1]))"
    said = run(f"""for n in 0 1 2 128; do python3 -c '{command}' $n a$n 2>/dev/null; echo -n $?; done""").output
    assert said == "0011"
    assert run(f"python3 -c '{command}' 100 b; echo -n $?", max_waiting=128).output == "0"
    assert [record.getMessage() for record in caplog.records] == [
        "a sandbox cannot set /proc/sys/net/missing on this host: a program that listens with a longer queue than it "
        "may have is refused (docs/sandbox.md)"
    ]


ORDINARY = {
    "python": "python3 -c 'import json, decimal; print(sum(range(10)))'",
    "bash": "for i in 1 2 3; do echo $i; done | sort -r | tail -1 | xargs printf '%s5\\n' | sed s/^1/4/",
    "a pipe that ends early": "yes | head -1 | tr y 4; echo 5",
    "coreutils": "cp -a run.sh copy; cp --preserve=all copy again; mv again third; install -m 755 third x; cat x",
    "git": "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm one && git log --format=%s",
    "tar": "mkdir d && echo 45 > d/x && tar -czf d.tgz d && rm -r d && tar -xzf d.tgz && cat d/x",
    "sqlite": """python3 -c '
import sqlite3
for mode in ("delete", "wal"):
    base = sqlite3.connect("base"); base.execute(f"pragma journal_mode={mode}")
    base.execute("create table if not exists t (x)"); base.execute("insert into t values (45)"); base.commit()
print(base.execute("select max(x) from t").fetchone()[0])'""",
    "subprocess": """python3 -c '
import subprocess
print(subprocess.run(["cat"], input="x" * 10**6, capture_output=True, text=True).stdout.count("x"))'""",
    "asyncio": """python3 -c '
import asyncio
async def main():
    async def answer(reader, writer):
        writer.write(await reader.readline()); await writer.drain(); writer.close()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async def ask(n):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%d\\n" % n); line = await reader.readline(); writer.close(); return int(line)
        print(sum(await asyncio.gather(*map(ask, range(10)))))
    process = await asyncio.create_subprocess_exec("true"); await process.wait()
asyncio.run(main())'""",
    "multiprocessing": """python3 -c '
import multiprocessing as m
from concurrent.futures import ProcessPoolExecutor
def add(lock, value):
    with lock: value.value += 9
lock, value = m.Lock(), m.Value("i", 0)
workers = [m.Process(target=add, args=(lock, value)) for _ in range(5)]
[w.start() for w in workers]; [w.join() for w in workers]
with m.Pool(2) as pool, ProcessPoolExecutor(2) as other, m.Manager() as manager:
    manager.list([1]); assert pool.map(abs, [-1]) == list(other.map(abs, [-1]))
print(value.value)'""",
    "threads": "python3 -c 'from multiprocessing.pool import ThreadPool as T; print(sum(T(8).map(int, range(10))))'",
    "copies of files": """python3 -c '
import shutil; shutil.copytree("a", "b"); shutil.copyfile("a/x.txt", "c")'; cat c""",
    "a web server": """python3 -c '
import http.server, threading, urllib.request
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/a/x.txt").read().decode())' 2>/dev/null""",
    "a terminal": "script -qec 'echo 45' /dev/null",
    "zeros": "head -c 45 /dev/zero | wc -c; dd if=/dev/zero of=z bs=1k count=45 status=none; stat -c %s z",
    "a compiler": """
command -v gcc >/dev/null || { echo 45; exit; }
echo 'int main(){return 45;}' > m.c; gcc m.c -o m; ./m; echo $?""",
    "node": """
command -v node >/dev/null || { echo 45; exit; }
node -e 'require("child_process").execSync("true"); console.log(45)'""",
}
ANSWERS = {"coreutils": "yes", "git": "one", "copies of files": "hi", "a web server": "hi", "subprocess": "1000000"}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_work(name: str) -> None:
    said = run(ORDINARY[name], memory_bytes=2 << 30).output
    answer = ANSWERS.get(name, "45")
    assert answer in said.replace("\n", ""), said
