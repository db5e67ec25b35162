"""Processes that an environment has started, in any way, end with its episode; those of other episodes continue."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path

import psutil
import pytest

from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import Task
from slipstream.envhub.isolation.offspring import end_offspring_of
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.tools.run.child import Child
from tests.guess import GuessEnv
from tests.processes import REPOSITORY, Process
from tests.waiting import wait_until

TASK = Task(env="daemons", split="train", index=0)
DEADLINE_S = 60.0


def _detached(seconds: str) -> None:
    subprocess.run(["sh", "-c", f"(setsid sleep {seconds} >/dev/null 2>&1 &)"], check=True)


async def _in_a_thread(seconds: str) -> None:
    thread = OwnThread("daemons")
    await thread.call(lambda: _detached(seconds))
    thread.end()


async def _in_a_task(seconds: str) -> None:
    await asyncio.create_task(asyncio.to_thread(_detached, seconds))


async def _by_asyncio(seconds: str) -> object:
    return await asyncio.create_subprocess_exec("sleep", seconds)


WAYS: dict[str, Callable[[str], object]] = {
    "a child": lambda seconds: subprocess.Popen(["sleep", seconds]),
    "a session of its own": lambda seconds: subprocess.Popen(["sleep", seconds], start_new_session=True),
    "a daemon": _detached,
    "by a shell": lambda seconds: os.system(f"sleep {seconds} &"),
    "with this environment": lambda seconds: subprocess.Popen(["sleep", seconds], env={**os.environ}),
    "with the environment itself": lambda seconds: subprocess.Popen(["sleep", seconds], env=os.environ),
    "with no environment": lambda seconds: subprocess.Popen(["/bin/sleep", seconds], env={}),
    "posix_spawn": lambda seconds: os.posix_spawn("/bin/sleep", ["sleep", seconds], os.environ),
    "a thread": _in_a_thread,
    "a task": _in_a_task,
    "asyncio": _by_asyncio,
}
_LEFT = list["subprocess.Popen[bytes]"]()


class DaemonsEnv(GuessEnv):
    """Starts a process when it is made, and `start` starts one in each way. It ends none of them."""

    def __init__(self, seconds: str, fails: bool = False) -> None:
        super().__init__()
        self.seconds = seconds
        self._children = list[object]()
        _detached(seconds)
        if fails:
            raise OSError("no such database")

    async def start(self) -> None:
        for start in WAYS.values():
            started = start(self.seconds)
            self._children.append(await started if asyncio.iscoroutine(started) else started)

    async def close(self) -> None:
        """Ends none of them; children are kept, because their parent has to wait for them."""
        _LEFT.extend(child for child in self._children if isinstance(child, subprocess.Popen))


def running(seconds: str) -> list[psutil.Process]:
    """The sleeps of that length; those that have ended and wait for their parent do not run."""
    found = [process for process in psutil.process_iter(["cmdline"]) if seconds in (process.info["cmdline"] or [])]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def lengths() -> tuple[str, str]:
    number = time.time_ns() % 10**7
    return f"{10**7 + number}", f"{2 * 10**7 + number}"


def daemons(seconds: str, **options: bool) -> dict[str, MixtureEntry]:
    return {"daemons": MixtureEntry(name=f"{__name__}:DaemonsEnv", options={"seconds": seconds, **options})}


async def test_all_that_an_episode_has_started_ends_with_it_and_nothing_of_another() -> None:
    one, other = lengths()

    async def plays() -> None:
        async with fresh_env(daemons(one), TASK, timeout_s=5.0) as env:
            assert isinstance(env, DaemonsEnv)
            await env.start()
            wait_until(lambda: len(running(one)) == 1 + len(WAYS), "all of them run")
        wait_until(lambda: not running(one), "all of them are gone")

    async with fresh_env(daemons(other), TASK, timeout_s=5.0) as beside:
        assert isinstance(beside, DaemonsEnv)
        await beside.start()
        await asyncio.create_task(plays(), context=Context())
        assert len(running(other)) == 1 + len(WAYS)
    wait_until(lambda: not running(other), "the other's are gone")
    assert {child.wait(DEADLINE_S) for child in _LEFT} == {-signal.SIGKILL}


async def test_what_an_environment_that_cannot_be_made_has_started_ends_too() -> None:
    one, _ = lengths()
    with pytest.raises(EpisodeFailed, match="no such database"):
        async with fresh_env(daemons(one, fails=True), TASK, timeout_s=5.0):
            pass
    wait_until(lambda: not running(one), "it is gone")


def test_what_a_killed_process_had_started_is_found_by_its_number(tmp_path: Path) -> None:
    one, _ = lengths()
    script = (
        "import subprocess, time; from slipstream.envhub.isolation.offspring import begin_episode; begin_episode(); "
        f"subprocess.run(['sh', '-c', '(setsid sleep {one} &)']); time.sleep(3600)"
    )
    process = Process("host", [sys.executable, "-c", script], log=tmp_path / "log", environment={})
    wait_until(lambda: bool(running(one)), "the daemon runs")
    process.kill()
    assert len(running(one)) == 1
    assert end_offspring_of(process.pid) == 1
    wait_until(lambda: not running(one), "it is gone")


RESTLESS = """
[ -e "$1/go" ] && kill -0 TESTS 2> /dev/null || exit
: > "$1/$2-$3"
case $2 in
    executes) exec sh "$0" "$@" ;;
    sleeps) sleep 0.01; exec sh "$0" "$@" ;;
    forks) setsid sh "$0" "$@" & ;;
    forks-twice) (setsid sh "$0" "$@" &) & ;;
esac
"""
KINDS = {"executes": 8, "sleeps": 8, "forks": 4, "forks-twice": 2}
STARTS = """
import subprocess, sys, time
from slipstream.envhub.isolation.offspring import begin_episode
begin_episode()
for kind, number in zip(sys.argv[2::2], sys.argv[3::2]):
    subprocess.run(["sh", "-c", f"(setsid sh {sys.argv[1]}/restless {sys.argv[1]} {kind} {number} &) &"], check=True)
time.sleep(3600)
"""


class Restless:
    """Daemons that execute their program, or fork and end, without a pause. Each writes a file when it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [(kind, str(number)) for kind, count in KINDS.items() for number in range(count)]
        # They end also where these tests are killed.
        (folder / "restless").write_text(RESTLESS.replace("TESTS", str(os.getpid())))
        (folder / "go").touch()

    def start(self) -> None:
        for kind, number in self.names:
            command = f"(setsid sh {self.folder}/restless {self.folder} {kind} {number} &) &"
            subprocess.run(["sh", "-c", command], check=True)

    def alive(self) -> set[str]:
        """Those that write within a second."""
        for file in self.folder.glob("*-*"):
            file.unlink(missing_ok=True)
        time.sleep(1.0)
        return {file.name for file in self.folder.glob("*-*")}


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[Restless]:
    yield Restless(tmp_path)
    (tmp_path / "go").unlink()  # a daemon that is left ends now


async def test_no_daemon_escapes_the_end_of_its_episode_by_forks_or_programs_without_pause(restless: Restless) -> None:
    async with fresh_env(daemons("3600"), TASK, timeout_s=5.0):
        restless.start()
        wait_until(lambda: len(restless.alive()) == len(restless.names), "all of them run")
    assert restless.alive() == set()


def test_no_daemon_escapes_the_end_of_its_killed_actor(restless: Restless) -> None:
    names = [word for name in restless.names for word in name]
    command = [sys.executable, "-c", STARTS, str(restless.folder), *names]
    paths = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
    actor = Child("actor", command, log=restless.folder / "log", environment={"PYTHONPATH": paths})
    actor.start()
    wait_until(lambda: len(restless.alive()) == len(restless.names), "all of them run")
    actor.send(signal.SIGKILL)
    actor.wait(DEADLINE_S)
    assert restless.alive() == set()


ENDS_LATE = """
import builtins, os
from slipstream.envhub.isolation import offspring
offspring.begin_episode()
class Late:
    def __del__(self, opened=open):
        opened("/dev/null").close()
builtins.kept = [offspring, os, Late]  # Python sets the names of modules that it cannot delete to None, one by one
os.late = Late()
builtins.late = Late()
"""


def test_a_process_that_has_played_ends_without_a_word() -> None:
    """Python calls hooks at its very end too, when the names of modules are None."""
    done = subprocess.run([sys.executable, "-c", ENDS_LATE], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
