"""BrowserGym with Debian's Chromium, really played: `make test-adapters-browser` installs both and runs it."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from slipstream.actors.episode.answer import answer
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from tests.adapters.held import ALWAYS
from tests.envhub.env_cases import Case, task_of
from tests.http_stand_in import Asked, HttpStandIn, Reply
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # Gymnasium's own

ENTER_TEXT, SAMPLES = "browsergym/miniwob.enter-text", ("noop(1)", "clear('14')")
CASE = Case("browsergym", 20, 0, {"train": [ENTER_TEXT]}, share=0.01, max_walk=2, samples=SAMPLES)


def page(observation: Observation) -> str:
    return observation.messages[-1].content


def bid(text: str, pattern: str) -> str:
    found = re.search(rf"\[(\w+)\] {pattern}", text)
    assert found is not None, f"no {pattern} in\n{text}"
    return found[1]


def processes_left() -> set[int]:
    """The processes that the adapter's folder is an argument of."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if b"/slipstream-browsergym-" in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def folders_left() -> set[Path]:
    return set(Path("/tmp").glob("slipstream-browsergym-*"))


@pytest.mark.parametrize("check", [*ALWAYS[:1], *ALWAYS[2:4], *ALWAYS[6:]], ids=lambda check: check.__name__)
def test_browsergym_keeps_the_contract(check: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.envhub.env_cases.offered", lambda env, case: list(case.samples))  # there are no experts
    check(CASE)


async def test_scripts_solve_pages_of_two_tasks_by_turns() -> None:
    def click_one(text: str) -> list[str]:
        one = bid(text, "button 'ONE'")
        return [f"click('{one}')"]

    def enter(text: str) -> list[str]:
        wanted = re.search(r'Enter "(.*)" into', text)
        assert wanted is not None
        return [f"fill('{bid(text, 'textbox')}', {wanted[1]!r})", f"I say click('{bid(text, 'button')}')"]

    env = make_env("browsergym", {"train": ["browsergym/miniwob.click-test-2", ENTER_TEXT]})
    for index, player in enumerate((click_one, enter)):
        observations = [await env.reset(task_of("browsergym", index))]
        for action in player(page(observations[0])):
            observations.append(await env.step(action))
        assert "click(bid: str" in observations[0].messages[0].content
        assert "upload_file" not in observations[0].messages[0].content
        end = observations[-1]
        assert (end.terminated, end.success, end.score, end.rewards) == (True, True, 1.0, {"task": 1.0})
    with pytest.raises(EnvError, match="is over; call reset first"):
        await env.step("noop(1)")
    await env.close()


async def test_what_is_not_understood_is_said_and_nothing_is_handed_out_or_run() -> None:
    env = make_env("browsergym", {})
    start = page(await env.reset(task_of("browsergym")))
    for action, why in (
        ("hello", "Received an empty action"),
        ("click('999')", "Could not find element with bid"),
        ("upload_file('13', '/etc/passwd')", "Invalid action type 'upload_file'"),
        ("click('13') click('14')", "Received a multi-action"),
        ("noop(60000)", "noop waits for 5000 ms at most"),
        ("goto('javascript:core.endEpisode(1)')", "goto takes an address"),
        ("page.evaluate('core.endEpisode(1)')", "Invalid action type 'evaluate'"),
        ("[" * 3000, "Received an empty action"),
    ):
        observation = await env.step(action)
        assert (observation.valid_action, observation.done, observation.rewards) == (False, False, {"task": 0.0})
        assert why in page(observation), action
        assert page(observation).endswith(start.split("\n\n", 1)[1])
    await env.close()


@contextlib.contextmanager
def site() -> Iterator[int]:
    """A loopback site of one page that says where it was asked for; its port."""

    def page(asked: Asked) -> Reply:
        return 200, {"Content-Type": "text/html"}, f"<button>{asked.path}</button>".encode()

    with HttpStandIn(page) as server:
        yield int(server.url.rpartition(":")[2])


def test_only_the_sites_that_are_named_are_reached() -> None:
    async def surf(mine: int, other: int) -> None:
        url = f"http://127.0.0.1:{mine}/start"
        settings = {"task_kwargs": {"start_url": url, "goal": "Look around."}}
        options = {"train": ["browsergym/openended"], "settings": settings}
        env = make_env("browsergym", {**options, "sites": [f"127.0.0.1:{mine}"]})
        assert "button '/start'" in page(await env.reset(task_of("browsergym")))
        elsewhere = await env.step(f"goto('http://127.0.0.1:{other}/')")
        assert not elsewhere.valid_action and "net::ERR_PROXY_CONNECTION_FAILED" in page(elsewhere)
        assert "button '/there'" in page(await env.step(f"goto('http://127.0.0.1:{mine}/there')"))
        tabs = page(await env.step("new_tab()"))
        assert f"tab 0: http://127.0.0.1:{mine}/there\ntab 1: about:blank\nshown: about:blank" in tabs
        told = await env.step("send_msg_to_user('done')")
        assert (told.valid_action, told.done) == (True, False)
        given_up = await env.step("report_infeasible('no goal')")
        assert (given_up.terminated, given_up.success) == (True, False)
        await env.close()
        alone = make_env("browsergym", options)
        with pytest.raises(EnvError, match=r"net::ERR_INTERNET_DISCONNECTED|net::ERR_CONNECTION_REFUSED"):
            await alone.reset(task_of("browsergym"))
        await alone.close()

    with site() as mine, site() as other:
        asyncio.run(surf(mine, other))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_dies_or_hangs_fails_the_episode_and_nothing_is_left(sent: signal.Signals) -> None:
    before, folders = processes_left(), folders_left()
    env = make_env("browsergym", {})
    start = await env.reset(task_of("browsergym"))
    for pid in processes_left() - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
    with pytest.raises(EnvError, match=r"BrowserGym's process is lost|no answer within"):
        await answer(partial(env.step, "noop(1)"), timeout_s=2)
    await env.close()
    wait_until(lambda: processes_left() <= before)
    assert folders_left() <= folders
    assert await env.reset(task_of("browsergym")) == start
    await env.close()
    wait_until(lambda: processes_left() <= before)


def test_a_task_that_nobody_registers_is_refused() -> None:
    for game, why in (
        ("browsergym/miniwob.click-tets", "which BrowserGym does not know"),
        ("browsergym/webarena.4", "needs the package browsergym.webarena.*pip install browsergym-webarena"),
        ("click-test", "must be BrowserGym's ids, such as browsergym/webarena.4, got 'click-test'"),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("browsergym", {"train": [game]})
