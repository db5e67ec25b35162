"""The parts of the adapter to BrowserGym; `make test-adapters-browser` plays it in a browser."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slipstream.envhub.adapters.browsergym import _Worker
from slipstream.envhub.adapters.browsergym_worker import Begin, check_call, module_of
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation import chromium
from slipstream.envhub.isolation.own_process import OwnProcess
from tests.waiting import wait_until

DEADLINE_S = 60.0
# In Chromium's place: says what it is given and what it can reach.
PROBE = """#!/bin/bash
echo "given: $*"
echo "root: $(ls -x -w 999 /)"
echo "user: $(id -u) $(grep NoNewPrivs /proc/self/status | tr -d '\\t')"
echo "pages: $(cat /pages/page.html)"
echo "processes: $(ls -d /proc/[0-9]* | wc -l)"
(exec 3<>"/dev/tcp/127.0.0.1/$(cat /pages/port)") 2>/dev/null && echo reached || echo "not reached"
touch /usr/mine /pages/mine 2>/dev/null || echo "read only"
"""


def test_waits_are_bounded_and_an_address_is_of_a_site() -> None:
    for name, arguments in (("noop", []), ("noop", [5000]), ("goto", ["http://a/b"]), ("click", ["javascript:"])):
        check_call(name, arguments)
    for name, arguments in (("noop", [5001]), ("noop", ["x"]), ("goto", ["javascript:x"]), ("goto", ["file:///etc"])):
        with pytest.raises(ValueError, match=rf"{name} (waits|takes)"):
            check_call(name, arguments)


def test_a_task_is_registered_by_the_module_of_its_benchmark() -> None:
    assert module_of("browsergym/webarena.4") == "browsergym.webarena"
    assert module_of("browsergym/workarena.servicenow.order-ipad-pro") == "browsergym.workarena"
    assert module_of("browsergym/openended") == "browsergym.core"


@pytest.fixture
def folder(readable: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pages that everybody may read, and the probe in Chromium's place."""
    monkeypatch.setattr(chromium, "CHROMIUM", "/pages/probe")
    (pages := readable / "pages").mkdir()
    (pages / "page.html").write_text("hello")
    (pages / "probe").write_text(PROBE)
    (pages / "probe").chmod(0o755)
    return readable


def launched(folder: Path, *arguments: str, sites: Sequence[str] = ()) -> list[str]:
    """What the probe says while a loopback port of the host listens."""
    chromium.write_launcher(folder / "chromium", pages=folder / "pages", sites=sites)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (folder / "pages" / "port").write_text(str(server.getsockname()[1]))
        started = subprocess.run([folder / "chromium", *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert started.returncode == 0, started.stderr
    return started.stdout.splitlines()


def test_the_browser_sees_no_network_no_file_of_the_host_and_no_process(folder: Path) -> None:
    given, root, user, pages, processes, reached, written = launched(folder, "--headless", "--no-sandbox", "a b")
    assert given.endswith("--headless a b")  # and its own sandbox stays on
    assert root.split()[1:] == ["bin", "dev", "etc", "home", "lib", "lib64", "pages", "proc", "sbin", "tmp", "usr"]
    assert (user, pages) == ("user: 1000 NoNewPrivs:1", "pages: hello")
    assert int(processes.split()[1]) < 10
    assert (reached, written) == ("not reached", "read only")


def test_named_sites_give_the_browser_the_network_and_a_missing_proxy_for_other_sites(folder: Path) -> None:
    given, *_, reached, _ = launched(folder, sites=["shop.example:7770", "127.0.0.1:80"])
    assert "--proxy-server=http://127.0.0.1:9 --proxy-bypass-list=<-loopback>;shop.example:7770;127.0.0.1:80" in given
    assert reached == "reached", "only the proxy holds it back: Chromium does what its flags say, a probe does not"


def test_root_reports_pages_that_another_user_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o700)
    with pytest.raises(ValueError, match=r"cannot read .*pages: install the environment in a folder"):
        chromium.require_readable(tmp_path / "pages")


def test_what_is_missing_is_said_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "_NEEDED", (("bwrap", "bubblewrap"), ("/no/chromium", "chromium")))
    with pytest.raises(ValueError, match="/no/chromium is missing; install it: apt-get install chromium"):
        chromium.require_chromium()


def test_a_process_is_ended_with_all_that_it_started() -> None:
    process = OwnProcess(name="test")
    process.start(["bash", "-c", "trap '' TERM; sleep 600 & echo $! $TMPDIR; wait"], env={"PATH": os.defpath})
    child, folder = wait_until(lambda: process.log_tail().split())
    assert folder == str(process.folder) and process.folder.is_dir()
    process.end()
    process.end()
    wait_until(lambda: not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE)
    assert not process.folder.exists()


def test_a_process_ends_with_the_one_that_started_it() -> None:
    starts = (
        "import time; from slipstream.envhub.isolation.own_process import OwnProcess;"
        "process = OwnProcess(name='test');"
        "process.start(['sleep', '600'], env={'PATH': '/usr/bin:/bin'}); print(process._process.pid, flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([child], timeout=DEADLINE_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


BEGIN = Begin(game="browsergym/openended", seed=1, settings={})


def test_what_fails_in_browsergyms_process_is_a_failure_of_the_environment() -> None:
    worker = _Worker(pages=None, sites=())
    try:
        for _ in range(2):  # it lives on
            with pytest.raises(EnvError, match="BrowserGym failed: ModuleNotFoundError: No module named 'browsergym'"):
                asyncio.run(worker.request(BEGIN))
    finally:
        worker.end()


async def test_a_process_of_browsergyms_that_hangs_is_ended_and_then_lost() -> None:
    worker = _Worker(pages=None, sites=())
    assert worker._process._process is not None
    pid = worker._process._process.pid
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(worker.request(BEGIN))
    await asyncio.sleep(0)
    await asyncio.to_thread(worker.end)
    with pytest.raises(EnvError, match="BrowserGym's process is lost"):
        await asked
    assert not psutil.pid_exists(pid)
