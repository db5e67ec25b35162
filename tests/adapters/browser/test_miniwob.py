"""MiniWoB++'s pages in Debian's Chromium, really clicked: `make test-adapters-browser` installs both and runs it."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from slipstream.actors.episode.answer import answer
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Env, EnvError, Observation
from tests.adapters.browser.left import folders_of, processes_of
from tests.adapters.held import ALWAYS
from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")  # Gymnasium's own

SAMPLES = ("wait", "press <Tab>", "type 5 ab c")
CASES = [
    Case(name="miniwob", max_turns=20, noisy_success=0, options={"game": game}, share=0.01, samples=SAMPLES)
    for game in ("enter-text",)
]
CHECKS = [*ALWAYS[:4], *ALWAYS[6:], contract.test_a_random_policy_never_breaks_it_and_every_turn_says_what_it_earned]


def task(index: int = 0, split: str = "train") -> Task:
    return Task(env="miniwob", split=split, index=index)


def page(observation: Observation) -> str:
    return observation.messages[-1].content


def number(text: str, pattern: str) -> int:
    """The number of the first element whose line matches."""
    found = re.search(rf"\[(\d+)\] .*{pattern}", text)
    assert found is not None, f"no {pattern} in\n{text}"
    return int(found[1])


def click_test_2(text: str) -> list[str]:
    one = number(text, 'button.* "ONE"')
    return [f"click {one}"]


def enter_text(text: str) -> list[str]:
    wanted = re.search(r'Enter "(.*)" into', text)
    assert wanted is not None
    return [f"type {number(text, 'input_text')} {wanted[1]}", f"click {number(text, 'button')}"]


def login_user(text: str) -> list[str]:
    wanted = re.search(r'username "(.*)" and the password "(.*)" into', text)
    assert wanted is not None
    return [
        f"type {number(text, 'input_text#username')} {wanted[1]}",
        f"type {number(text, 'input_password#password')} {wanted[2]}",
        f"click {number(text, 'button')}",
    ]


def click_checkboxes(text: str) -> list[str]:
    """A label holds the box and its name."""
    names = [name for name in text.split("Select ")[1].split(" and click Submit")[0].split(", ") if name != "nothing"]
    boxes = [re.search(rf'\[(\d+)\] input_checkbox\S*\n\s*"{re.escape(name)}"', text) for name in names]
    return [*(f"click {box[1]}" for box in boxes if box), f"click {number(text, 'button')}"]


def choose_list(text: str) -> list[str]:
    """Keys choose from a list: its options are not on the page before it is opened."""
    wanted = re.search(r"Select (.*) from the list", text)
    assert wanted is not None
    return [f"type {number(text, 'select')} {wanted[1]}", f"click {number(text, 'button')}"]


PLAYERS = {
    "click-test-2": click_test_2,
    "enter-text": enter_text,
    "login-user": login_user,
    "click-checkboxes": click_checkboxes,
    "choose-list": choose_list,
}


async def play(env: Env, task: Task, player: Callable[[str], list[str]]) -> list[Observation]:
    observations = [await env.reset(task)]
    for action in player(page(observations[0])):
        observations.append(await env.step(action))
    return observations


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_miniwob_keeps_the_contract(case: Case, check: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tests.envhub.env_cases", "tests.envhub.test_env_contract"):
        monkeypatch.setattr(f"{module}.offered", lambda env, case: list(case.samples))  # there are no experts
    check(case)


@pytest.mark.parametrize("game", PLAYERS)
async def test_a_script_solves_the_page_and_a_wrong_one_does_not(game: str) -> None:
    env, openings = make_env("miniwob", {"game": game}), set()
    for split, index in (("train", 0), ("train", 1), ("held_out", 0)):
        observations = await play(env, task(index, split), PLAYERS[game])
        end = observations[-1]
        assert (end.terminated, end.success, end.score, end.rewards) == (True, True, 1.0, {"page": 1.0})
        assert all(observation.rewards == {"page": 0.0} for observation in observations[1:-1])
        openings.add(page(observations[0]))
    assert len(openings) == (1 if game == "click-test-2" else 3)  # its seeds move the buttons only
    start = await env.reset(task())
    wrong = [f"click {number(page(start), 'button.*')}"] if game != "click-test-2" else ["click 5"]
    end = await env.step(wrong[0])
    assert (end.terminated, end.success, end.score) == (True, False, 0.0)
    with pytest.raises(EnvError, match="is over; call reset first"):
        await env.step("wait")
    await env.close()


async def test_what_is_typed_is_seen_and_what_makes_no_sense_changes_nothing() -> None:
    env = make_env("miniwob", {"game": "enter-text"})
    start = page(await env.reset(task()))
    field = number(start, "input_text")
    for action in ("click 999", "type 99 x", "fly", "press A-<F4>", "", "type 5 \ue007"):
        refused = await env.step(action)
        assert (refused.valid_action, refused.rewards) == (False, {"page": 0.0})
        assert page(refused).split("\n", 1)[1] == start.split("\n\n", 1)[1]
    typed = page(await env.step(f"type {field} né 'x'"))
    assert f"[{field}] input_text#tt (now \"né 'x'\") (focused)" in typed
    await env.close()


async def test_what_is_animated_is_over_when_a_policy_looks() -> None:
    env = make_env("miniwob", {"game": "click-collapsible"})
    start = page(await env.reset(task(1)))
    opened = page(await env.step(f"click {number(start, 'h3')}"))
    assert opened == page(await env.step("wait")) != start
    await env.close()


def test_a_page_that_moves_by_the_clock_stands_still_while_a_policy_thinks() -> None:
    async def watch(thinks_s: float) -> list[Observation]:
        env = make_env("miniwob", {"game": "stock-market"})
        observations = [await env.reset(task())]
        for _ in range(4):
            await asyncio.sleep(thinks_s)
            observations.append(await env.step("wait"))
        await env.close()
        return observations

    at_once = asyncio.run(watch(0))
    assert len({page(observation) for observation in at_once}) > 2
    assert asyncio.run(watch(0.37)) == at_once


async def test_nothing_of_a_browser_is_left_and_it_has_its_own_sandbox_as_nobody() -> None:
    before, folders = processes_of("miniwob"), folders_of("miniwob")
    env = make_env("miniwob", {})
    await env.reset(task())
    assert len(processes_of("miniwob") - before) > 3
    await env.close()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step("wait")
    wait_until(lambda: processes_of("miniwob") <= before)
    assert folders_of("miniwob") <= folders


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_browser_that_dies_or_hangs_fails_the_episode_and_the_next_has_another(sent: signal.Signals) -> None:
    before = processes_of("miniwob")
    env = make_env("miniwob", {})
    start = await env.reset(task())
    for pid in processes_of("miniwob") - before:
        with contextlib.suppress(ProcessLookupError):  # some end with the first that is killed
            os.kill(pid, sent)
    with pytest.raises(EnvError, match=r"the browser failed|no answer within"):
        await answer(partial(env.step, "wait"), timeout_s=2)
    await env.close()
    wait_until(lambda: processes_of("miniwob") <= before)
    assert await env.reset(task()) == start
    await env.close()


def test_the_browser_ends_with_an_actor_that_is_killed() -> None:
    plays = (
        "import asyncio, time; from slipstream import Task, make_env;"
        "asyncio.run(make_env('miniwob', {}).reset(Task(env='m', split='train', index=0)));"
        "print('playing', flush=True); time.sleep(600)"
    )
    before = processes_of("miniwob")
    with subprocess.Popen([sys.executable, "-c", plays], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdout.readline() == "playing\n"
        assert processes_of("miniwob") - before
        actor.kill()
    wait_until(lambda: processes_of("miniwob") <= before)


def test_a_page_that_is_not_there_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(
        ValueError, match=r"must be one of MiniWoB\+\+'s pages, got 'click-tets'; did you mean click-test"
    ):
        make_env("miniwob", {"game": "click-tets"})
