"""The sandbox: what goes in and comes out, its limits, and attempts to get out of it."""

import asyncio
import gc
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.file_tree import Node, Tree, TreeError, file, folder, pack, unpack
from slipstream.envhub.isolation.sandbox import HOME, Finished, Limits, Place, require_sandbox, run_in_sandbox
from slipstream.envhub.step_deadline import StepDeadline
from tests.envhub.isolation.sandboxed import LIMITS, TREE, allowed, run, running
from tests.waiting import until, wait_until


def test_a_command_sees_the_tree_and_leaves_a_new_one() -> None:
    finished = run("pwd; ./run.sh; cat a/x.txt; echo new > b; rm -r a; ln -s b link; mkdir c; echo oops >&2; exit 3")
    assert (finished.exit_code, finished.output) == (3, f"{HOME}\nyes\nhi\noops\n")
    link = Node(kind="link", content=b"b", mode=0o777)
    assert finished.tree == {"b": file("new\n"), "c": folder(), "link": link, "run.sh": TREE["run.sh"]}


def test_a_tree_that_is_not_touched_comes_back_as_it_was() -> None:
    assert run("true").tree == TREE
    link = Node(kind="link", content=b"\xff", mode=0o777)
    hidden: Tree = {**TREE, ".git": folder(), ".git/config": file("[core]\n"), "a/.x": link}
    assert unpack(pack(hidden)) == hidden
    assert run("true", hidden).tree == hidden


def test_names_that_are_no_text_or_too_long_do_no_harm_to_the_next_run() -> None:
    odd = run("touch -- 'new\nline' '-rf' ' '")
    assert odd.tree is not None and len(odd.tree) == len(TREE) + 3
    assert run("ls | wc -l", odd.tree).output.strip() == "6"
    for length in (95, 99, 120, 250):
        left = run(f"touch $(printf 'x%.0s' $(seq {length})) $(printf '\\xff%.0s' $(seq {length}))").tree
        assert left is None or run("ls", left).exit_code == 0


def test_the_same_command_on_the_same_tree_says_the_same_and_nothing_of_one_run_is_there_in_the_next() -> None:
    commands = "ls -lR --time-style=+%Y; find . | sort; md5sum run.sh; id; hostname; pwd; ls -a /tmp; ps -e | wc -l"
    first = run(commands)
    assert run(commands) == first
    run("echo x > /tmp/left; echo y > left; (sleep 1000 &)")
    assert run(commands) == first and "left" not in first.output


def test_the_hosts_files_environment_and_processes_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("s3cret")
    hosts = f"{tmp_path}/secret /etc/passwd /etc/shadow /root/.bashrc /proc/1/root/etc/passwd"
    said = run(f"cat {hosts}; ls / /home /etc").output
    assert "s3cret" not in said and "root:" not in said
    assert run("ls /").output.split() == ["bin", "dev", "etc", "home", "lib", "lib64", "proc", "tmp", "usr"]
    assert run("ls /usr/local /usr/src 2>/dev/null | grep -v :").output.strip() == ""
    assert run("ls /usr/local /usr/src", {}, place=Place.ROOT).output.count("No such file") == 2
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    said = run("env; cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/*/cmdline | tr '\\0' ' '; ls /proc/*/fd").output
    assert "s3cret" not in said and "AWS" not in said
    assert str(Path.cwd()) not in said
    numbers = [int(name) for name in run("ls /proc").output.split() if name.isdigit()]
    assert max(numbers) < 20


def test_there_is_no_network_no_metadata_address_and_no_host_socket(tmp_path: Path) -> None:
    server, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(f"\0slipstream-test-{os.getpid()}")  # abstract: reachable from any mount namespace
    unix.listen()
    code = f"""
import socket
for address in (("127.0.0.1", {server.getsockname()[1]}), ("169.254.169.254", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(address, timeout=3)
        print("reached", address)
    except OSError as error:
        print("not reached")
try:
    socket.socket(socket.AF_UNIX).connect("\\0slipstream-test-{os.getpid()}")
    print("reached unix")
except OSError:
    print("not reached")
"""
    with server, unix:
        assert run(f"python3 -c '{code}'").output == "not reached\n" * 4


def test_a_command_writes_nothing_but_home_and_tmp_and_gets_no_capability_from_a_setuid_program() -> None:
    others = ("/", "/usr/bin", "/usr/local", "/dev", "/home", "/proc/sys/kernel", "/etc", "/sys")
    assert allowed(*(f"echo x > {path}/mine" for path in others), "mount -t tmpfs none /usr") == []
    # An own user namespace gives no power over what is outside.
    own = run("unshare -Ur true || echo refused; echo 1 > /proc/sys/vm/drop_caches || echo refused")
    assert own.output.count("refused") >= 1
    said = run("grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").output
    assert said.split() == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


ESCAPES = {
    "a mount in a namespace of its own": "unshare -Urm sh -c 'mount -t tmpfs none /tmp'",
    "shared memory of System V": "ipcmk -M 100M",
    "a file that is memory": "python3 -c 'import os; os.memfd_create(\"x\")'",
    "many open files": "python3 -c 'import os; [os.dup(0) for _ in range(300)]'",
    "messages of System V": "ipcmk -Q",
    "strace": "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != 0)'",
}


def test_no_memory_beyond_the_limits_and_no_other_process_can_be_reached() -> None:
    assert allowed(*ESCAPES.values()) == []


STOPPING = {
    "stops the driver": "kill -STOP 1",
    "stops all": "for i in $(ls /proc | grep -E '^[0-9]+$'); do [ $i = $$ ] || kill -STOP $i; done; kill -STOP -1",
    "stops what counts its time": "kill -STOP $PPID",
    "stops what counts its time, and ends": "kill -STOP $PPID; exit",
    "stops itself": "kill -STOP $$",
    "ends the driver": "kill -9 1; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -ABRT 1",
    "ends all": "kill -9 -1",
    "fills the pipe of the tree": "yes > /proc/1/fd/1",
    "holds its output": "(trap '' HUP TERM; sleep 1000) & sleep 1000",
}


async def test_no_command_outlives_its_step_and_only_one_without_time_to_start_is_an_environment_failure() -> None:
    """Steps of 9 s, of which a command may take 6; the sandbox's own limit is longer."""

    async def played(stopping: str) -> Finished:
        async with asyncio.timeout(9.0):
            with StepDeadline(9.0):
                return await run_in_sandbox(f"echo hi > new; {stopping}", TREE, limits=LIMITS)

    for name, finished in zip(STOPPING, await asyncio.gather(*map(played, STOPPING.values())), strict=True):
        if finished.tree is not None:
            assert "new" in finished.tree, name
        else:
            assert "[killed: it ran out of time]" in finished.output, name
    with pytest.raises(EnvError, match="this machine is too busy"), StepDeadline(0.001):
        await run_in_sandbox("true", TREE, limits=LIMITS)


def test_a_command_that_runs_or_computes_too_long_is_killed_with_all_its_children() -> None:
    marker = f"{time.time_ns() % 10**6 + 10**6}"
    started = time.monotonic()
    finished = run(f"(setsid sleep {marker} &) ; echo half > b; sleep {marker}", wall_s=1)
    assert (finished.exit_code, "killed" in finished.output) == (137, True)
    assert time.monotonic() - started < 60
    assert finished.tree is not None and finished.tree["b"] == file("half\n")
    assert not running(marker)
    finished = run("while :; do :; done; echo after", wall_s=20, cpu_s=1)
    assert (finished.exit_code, "after" in finished.output) == (137, False)


def check_cancelled(marker: str, command: str, begun: Callable[[], Awaitable[None]], **settings: Any) -> None:
    async def cancelled() -> None:
        turn = asyncio.ensure_future(run_in_sandbox(command, TREE, limits=LIMITS, **settings))
        await begun()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(cancelled())
    gc.collect()
    wait_until(lambda: not running(marker), "a bubblewrap and its command, left behind, to be gone")


def test_a_cancelled_run_leaves_no_process() -> None:
    marker = f"{time.time_ns() % 10**6 + 2 * 10**6}"
    check_cancelled(marker, f"sleep {marker}", lambda: until(lambda: bool(running(marker)), "the command"))


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_a_run_that_is_cancelled_while_it_starts_leaves_no_process_and_no_open_pipe(after_s: float) -> None:
    """Unclosed pipes would be warned of when they are collected, and a warning fails a test."""
    marker = f"/{time.time_ns() % 10**6}"
    check_cancelled(marker, "true", lambda: asyncio.sleep(after_s), mounts={Path("/usr"): marker})


async def test_a_fork_bomb_stays_inside_its_number_of_processes() -> None:
    bomb = "for i in $(seq 200); do sleep 5.125 & done 2>/dev/null; :(){ :|:& };: ; wait"
    limits = Limits(wall_s=2, max_processes=16)
    turn, most = asyncio.ensure_future(run_in_sandbox(bomb, TREE, limits=limits)), 0
    while not turn.done():
        await asyncio.wait([turn], timeout=0.05)
        commands = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
        most = max(most, commands.count(["sleep", "5.125"]))  # no other test's
    assert 0 < most <= 16
    assert turn.result().tree == TREE


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python3 -c 'x = bytearray(10**9)'", "MemoryError"),
        ("head -c 30000000 /dev/zero > big", "File size limit exceeded"),
        ("for i in 1 2 3 4 5 6; do head -c 3000000 /dev/zero > big$i; done", "No space left on device"),
        ("for i in 1 2 3 4 5 6; do head -c 3000000 /dev/zero > /tmp/big$i; done", "No space left on device"),
        ("head -c 30000000 /dev/zero > /dev/shm/big", "error writing|limit exceeded|No space"),
    ],
)
def test_memory_files_and_disk_are_limited(command: str, said: str) -> None:
    assert any(part in run(command).output for part in said.split("|"))


def test_long_output_is_cut_and_too_many_files_are_not_kept() -> None:
    loud = run("yes | head -c 3000000", output_bytes=1000)
    assert loud.output == "y\n" * 500 + "\n[cut]"
    assert loud.shown(10) == "y\n" * 5 + "\n[cut]" == run("yes | head -c 3000").shown(10)
    many = run("for i in $(seq 3000); do > f$i; done")
    assert many.tree is None and "more than 2000 files" in many.output and "more than 2000 files" in many.shown(0)


def test_files_and_names_that_would_not_go_in_again_are_not_kept_and_all_names_of_one_are() -> None:
    holes = run("truncate -s 4M a1 a2 a3")
    assert (holes.tree, "they take 12591104 bytes" in holes.output) == (None, True)
    full = run("rm -r a run.sh; head -c 4M /dev/zero > one; head -c 4M /dev/zero > two").tree
    assert full is not None and run("ls", full).output == "one\ntwo\n"
    assert "beside" in run("ls", full | {"beside": file("x" * 100_000)}).output
    linked = run("echo hello > f1; ln f1 f2").tree
    assert linked is not None and linked["f1"] == linked["f2"] == file("hello\n")
    twins = run("mkdir $'a\\xfe'; touch $'a\\xfe/x'; ln -s /usr $'a\\xff'")
    assert (twins.tree, "a file name that is not valid UTF-8" in twins.output) == (None, True)
    with pytest.raises(TreeError, match="duplicate path"):
        unpack(pack({"a": folder()})[:512] + pack({"a": folder()}))


def test_a_command_that_kills_everything_or_writes_over_the_tree_does_no_harm() -> None:
    assert run("kill -9 -1; kill -9 $PPID; true").exit_code != 0
    for garbage in ("echo garbage", "head -c 2000 /dev/urandom", "printf '%02000d' 7"):
        forged = run(f"{garbage} > /proc/$(ps -o ppid= -p $PPID | tr -d ' ')/fd/1")
        assert forged.tree is None or "x.txt" in str(forged.tree)


@pytest.mark.parametrize("code", [1, 97, 98, 126, 127, 255])
def test_no_exit_code_of_a_command_is_taken_for_the_sandboxs_own(code: int) -> None:
    assert run(f"exit {code}").exit_code == code


def test_hostile_tars_are_refused_and_never_waited_for() -> None:
    good = pack(TREE)
    header = good[:512]
    sizes = (b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11)
    of_wrong_size = [header[:124] + size + header[136:] + bytes(1024) for size in sizes]
    outside = b"../../etc/cron".ljust(100, b"\0") + header[100:] + bytes(1024)
    for bad in (b"", good[:1200], *of_wrong_size, outside):
        with pytest.raises(TreeError):
            unpack(bad)
    device = header[:156] + b"3" + header[157:] + bytes(1024)
    assert unpack(device) == {}


def test_a_missing_sandbox_is_an_error_that_names_the_package(readable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(readable))
    with pytest.raises(ValueError, match=r"install bubblewrap .* commands never run outside a sandbox"):
        require_sandbox()
    (readable / "bwrap").write_text("#!/bin/sh\necho 'no user namespaces here' >&2; exit 1\n")
    (readable / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{readable}:/usr/bin:/bin")
    with pytest.raises(EnvError, match="did not start, exit code 1: no user namespaces here"):
        run("true")


def test_a_sandbox_that_would_show_this_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder_of_package, is_shown in (("/usr/lib/python3/dist-packages", True), ("/usr/local/lib", False)):
        monkeypatch.setattr("slipstream.envhub.isolation.sandbox.__file__", f"{folder_of_package}/envhub/sandbox.py")
        with pytest.raises(ValueError, match="install it elsewhere") if is_shown else nullcontext():
            require_sandbox()


async def test_processes_run_beside_a_command_under_the_same_numbers_until_one_ends_them() -> None:
    seen = "for name in one two three; do grep -l ^$name /proc/[0-9]*/cmdline; done"
    end_two = "kill $(grep -l ^two /proc/[0-9]*/cmdline | cut -d/ -f3)"
    names = ["one", "two", "three"]
    first = await run_in_sandbox(f"{seen}; {end_two}", TREE, limits=LIMITS, processes=names)
    second = await run_in_sandbox(seen, TREE, limits=LIMITS, processes=first.processes)
    assert first.processes == second.processes == ("one", "", "three")
    one, two, three = first.output.splitlines()
    assert len({one, two, three}) == 3 and second.output.splitlines() == [one, three]
    assert first.tree == TREE == second.tree
