"""A failure of a served environment, its process, its server or the connection is an environment failure here."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.records.trajectory import Outcome
from slipstream.envhub.env import Env, EnvError
from tests.actors.episode.episodes import engine_of, rollout_of, saying
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.envhub.env_hosts import TASK, UNRULY, EnvHost, env_host, far, play_and_close
from tests.processes import Process
from tests.waiting import wait_until

PLAYS = """
import asyncio, sys
from tests.envhub.env_hosts import TASK, far

async def play():
    env = far(sys.argv[1], "grid")
    await env.reset(TASK)
    print("playing", flush=True)
    await asyncio.sleep(3600)

asyncio.run(play())
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    """A server with a timeout of 4 s for a step, and of 9 s for a worker."""
    with env_host(tmp_path_factory.mktemp("envs"), f"--names={UNRULY}", "env.step_timeout_s=4") as running:
        yield running


async def pid_of(env: Env) -> int:
    return int((await env.reset(TASK)).messages[0].content.removeprefix("pid "))


@pytest.mark.parametrize(
    ("action", "kind", "why"),
    [
        ("fail", EnvError, "the database is gone"),
        ("exit", EnvError, "SystemExit: 3"),
        ("refuse", ValueError, "no such thing"),
        ("garbage", EnvError, "answered a dict, not an Observation"),
        ("flood", EnvError, "the limit is 8388608"),
        ("dawdle", EnvError, "no answer within 4 s"),
    ],
)
async def test_an_error_is_the_same_at_the_client(host: EnvHost, action: str, kind: type[Exception], why: str) -> None:
    env = far(host.url, UNRULY)
    pid = await pid_of(env)
    with pytest.raises(kind, match=why):
        await env.step(action)
    # The process, which it shares with others, is not affected.
    assert (await env.step("hello")).rewards == {"said": 1.0}
    assert psutil.pid_exists(pid)
    await env.close()


def test_malformed_lists_and_advice_are_failures(host: EnvHost) -> None:
    env = far(host.url, UNRULY)
    asyncio.run(env.reset(TASK))
    with pytest.raises(EnvError, match="its answer cannot be encoded"):
        env.admissible()
    with pytest.raises(EnvError, match="ZeroDivisionError: who knows"):
        env.expert()
    asyncio.run(env.close())


@pytest.mark.parametrize(
    ("action", "why"),
    [("crash", "its process ended with -6"), ("hang", "did not answer for 9 s, and could not be interrupted")],
)
async def test_a_worker_that_crashes_or_hangs_costs_only_its_episodes(host: EnvHost, action: str, why: str) -> None:
    one, neighbour, other = (far(host.url, UNRULY) for _ in range(3))
    lost_before = host.health()["workers_lost"]
    pids = {env: await pid_of(env) for env in (one, other, neighbour)}
    assert pids[one] == pids[neighbour] != pids[other]  # shared out over two
    with pytest.raises(EnvError, match=why):
        await one.step(action)
    with pytest.raises(EnvError, match="the environment is lost"):
        await neighbour.step("hello")
    assert (await other.step("hello")).messages[0].content == "hello"
    assert await pid_of(one) != pids[one] and (await one.step("hello")).rewards == {"said": 1.0}
    for env in pids:
        await env.close()
    host.wait_until(lambda health: not psutil.pid_exists(pids[one]), "the end of the lost one")
    host.wait_until(lambda health: health["workers"] == 2, "the other worker")
    assert host.health()["workers_lost"] == lost_before + 1


@pytest.mark.parametrize("ending", ["close", "crash"])
async def test_a_daemon_ends_with_its_episode_and_no_other(host: EnvHost, ending: str) -> None:
    one, other = far(host.url, UNRULY), far(host.url, UNRULY)
    daemons = []
    for env in (one, other):
        await env.reset(TASK)
        daemons.append(int((await env.step("daemon")).messages[0].content))
    if ending == "crash":
        with pytest.raises(EnvError):
            await one.step("crash")
    await one.close()
    wait_until(lambda: not psutil.pid_exists(daemons[0]), "the daemon's end")
    assert psutil.pid_exists(daemons[1])
    await other.close()
    wait_until(lambda: not psutil.pid_exists(daemons[1]), "the other daemon's end")


def test_a_worker_that_is_killed_is_an_environment_failure_of_the_rollout(host: EnvHost) -> None:
    env, tokenizer = far(host.url, UNRULY), shop_tokenizer()

    async def play() -> None:
        with pytest.raises(EpisodeFailed, match="is lost: its process ended with -9") as failed:
            pid = await pid_of(env)
            psutil.Process(pid).kill()
            await rollout_of(env, engine_of(saying(tokenizer, "search")))
        assert failed.value.outcome is Outcome.ENV_FAILURE

    play_and_close(env, play)


async def test_a_server_that_is_killed_is_an_environment_failure_and_a_new_one_is_found(tmp_path: Path) -> None:
    with env_host(tmp_path, "--names=grid", "--processes=1") as first:
        env, port = far(first.url, "grid"), first.port
        await env.reset(TASK)
        (worker,) = first.workers()
        first.process.kill()
        with pytest.raises(EnvError, match="is lost: it closed the connection"):
            await env.step("up")
        with pytest.raises(EnvError, match="call reset first"):
            env.state_key()
        wait_until(lambda: not worker.is_running(), "the end of the killed server's worker")
        start = asyncio.create_task(env.reset(TASK))
        await asyncio.sleep(0.5)
        assert not start.done()
        with env_host(tmp_path, "--names=grid", "--processes=1", port=port):
            await start
            await env.step("up")
            await env.close()


def test_a_stopped_server_that_answers_no_ping_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envhub.remote.client_connection.PING_S", 2.0)
    with env_host(tmp_path, "--names=grid", "--processes=1") as host:
        env = far(host.url, "grid")
        asyncio.run(env.reset(TASK))
        host.process.send(signal.SIGSTOP)
        with pytest.raises(EnvError, match="is lost: it closed the connection"):
            asyncio.run(env.step("up"))
        host.process.send(signal.SIGCONT)


@pytest.mark.parametrize(
    ("sent", "lease_s", "wait_s"),
    [
        (signal.SIGKILL, 600, 0.5),  # the server learns of its end at once
        (signal.SIGSTOP, 4, 5.0),  # longer than the lease, which the player's pongs renew until it is stopped
    ],
)
async def test_a_silent_client_frees_its_slot(
    tmp_path: Path, sent: signal.Signals, lease_s: int, wait_s: float
) -> None:
    settings = ["--names=grid", "--max-episodes=1", "--processes=1"]
    with env_host(tmp_path, *settings, f"--lease-s={lease_s}") as host:
        player = Process("player", [sys.executable, "-c", PLAYS, host.url], log=tmp_path / "p", environment={})
        wait_until(lambda: "playing" in player.said(), "the first player")
        env = far(host.url, "grid")
        start = asyncio.create_task(env.reset(TASK))
        await asyncio.sleep(wait_s)
        assert not start.done() and host.health()["episodes"] == 1
        player.send(sent)
        await start
        assert host.health()["episodes"] == 1
        await env.close()
        assert host.health()["episodes"] == 0
        player.kill()


async def test_a_cancelled_step_leaves_nothing_behind(host: EnvHost) -> None:
    env = far(host.url, UNRULY)
    await env.reset(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await env.step("dawdle")
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("hello")
    for _ in range(20):
        await env.reset(TASK)
        waiting = asyncio.ensure_future(env.step("dawdle"))
        await asyncio.sleep(0.005)
        waiting.cancel()
        await env.reset(TASK)
        assert (await env.step("hello")).messages[0].content == "hello"
    await env.close()
    host.wait_until(lambda health: health["episodes"] == 0, "the slot")
