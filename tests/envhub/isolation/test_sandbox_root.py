"""A root directory as the tree of a sandbox: what a root in it may change, and what not."""

import asyncio
import os
import time

import pytest

from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.isolation.sandbox import Finished, Place, run_in_sandbox
from tests.envhub.isolation.sandboxed import LIMITS, allowed, run, running
from tests.waiting import until

ROOT: Tree = {"etc": folder(), "root": folder(0o700), "root/x.txt": file("hi\n", 0o600), "usr": folder()}


def run_as_root(command: str, tree: Tree = ROOT, **limits: float) -> Finished:
    return run(command, tree, place=Place.ROOT, **limits)


def test_a_root_directory_is_a_tree_that_a_root_may_change() -> None:
    assert run_as_root("true").tree == ROOT
    changes = "rm ~/x.txt; echo a > /etc/a; echo b > /usr/.b; mkdir /srv; cd /srv"
    finished = run_as_root(f"id -u; pwd; cat ~/x.txt; {changes}")
    assert finished.output == "0\n/\nhi\n"
    left = {name: node for name, node in ROOT.items() if name != "root/x.txt"}
    assert finished.tree == left | {"etc/a": file("a\n"), "srv": folder(), "usr/.b": file("b\n")}
    hidden = run_as_root("mkdir /srv; echo a > /srv/a; chmod 000 /srv/a /srv").tree
    assert hidden is not None and hidden["srv/a"] == file("a\n", 0o600)
    assert hidden["srv"] == folder(0o700)
    assert run_as_root("cat /srv/a", hidden).output == "a\n"


def test_the_root_of_a_root_directory_has_no_capability_and_is_unprivileged_outside() -> None:
    said = run_as_root("grep -E 'CapPrm|CapEff|CapBnd|NoNewPrivs' /proc/self/status; cat /proc/self/uid_map").output
    none = "0" * 16
    mapped = str(65534 if os.geteuid() == 0 else os.geteuid())
    # Where further user namespaces are forbidden, it is in two of them: the inner maps to 0 of the outer.
    *powers, inside, outside, number = said.split()
    assert powers == ["CapPrm:", none, "CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1"]
    assert (inside, number) == ("0", "1") and outside in ("0", mapped)
    marker = f"{time.time_ns() % 10**6 + 3 * 10**6}"

    async def seen_from_outside() -> set[int]:
        turn = asyncio.ensure_future(run_in_sandbox(f"sleep {marker}", ROOT, limits=LIMITS, place=Place.ROOT))
        await until(lambda: bool(running(marker)), "the command")
        users = {process.uids().real for process in running(marker)}
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        return users

    assert asyncio.run(seen_from_outside()) == {int(mapped)}
    refused = (
        "mount -t tmpfs none /etc",
        "chown 1 /root/x.txt",
        "echo x > /usr/bin/mine",
        "echo x > /dev/mine",
        "ls /home/*",
        "ls /usr/local/*",
        "echo 1 > /proc/sys/vm/drop_caches",
        "unshare -m true",
        "chroot / true",
        "(echo > /dev/tcp/127.0.0.1/22)",
        "mknod /null c 1 3 && cat /null",
    )
    assert allowed(*refused, tree=ROOT, place=Place.ROOT) == []


def test_the_size_of_a_root_directory_is_limited() -> None:
    assert "No space left" in run_as_root("for i in 1 2 3 4; do head -c 3000000 /dev/zero > /big$i; done").output
    assert "No space left" in run_as_root("for i in 1 2 3 4; do head -c 3000000 /dev/zero > /usr/big$i; done").output
    assert "Resource temporarily unavailable" in run_as_root("for i in $(seq 40); do sleep 5 & done", wall_s=1).output
