"""The browser of one MiniWoB++ environment: chromedriver, the Chromium that it starts, and a thread that uses it.

A page's clock runs for half a second after every action, and is stopped otherwise. So animations have ended when the
page is read, timers of a page run by turns, and the same actions meet the same page however long a policy takes.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.envhub.adapters.miniwob_text import PageAction
from slipstream.envhub.env import EnvError
from slipstream.envhub.isolation.chromium import CHROMEDRIVER, PAGES, write_launcher
from slipstream.envhub.isolation.own_process import OwnProcess
from slipstream.envhub.isolation.own_thread import OwnThread
from slipstream.envhub.package import require_package

INSTALL = "'miniwob==1.1.0'"  # also installs Selenium
TURN_MS = 501  # on the page's clock; not a multiple of pages' intervals, so that no timer is due when the clock stops
START_S = 60.0
POLL_S = 0.01
NO_END_MS = 2**31 - 1  # by default a page ends an episode after ten seconds; the run has its own timeouts
FIRST_MOMENT_S = 1_000_000_000  # the page's clock when it is opened, in seconds since 1970

_PORT = re.compile(r"started successfully on port (\d+)")
# While the clock is stopped, Chromium may or may not draw frames. So callbacks of frames become timers.
_NO_FRAMES = """
window.requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), 16);
window.cancelAnimationFrame = clearTimeout;
"""
_BEGIN = """
core.EPISODE_MAX_TIME = arguments[0];
Math.seedrandom(arguments[1]);
core.setDataMode(arguments[2]);
core.startEpisodeReal();
"""
_LOOK = """
return {done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL, ready: WOB_TASK_READY,
        utterance: core.getUtterance(), body: WOB_DONE_GLOBAL ? null : core.getDOMInfo()};
"""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageState:
    """The state of a page after a turn."""

    utterance: str
    body: Any  # a miniwob.dom.DOMElement; None after the end
    reward: float  # without the page's own deduction for time, in [-1, 1]; 0 before the end
    is_over: bool


class MiniWobBrowser:
    """Opens one page at a time, in a new tab. Every failure is an EnvError."""

    def __init__(self, *, pages: Path) -> None:
        self._actions = require_package("miniwob.selenium_actions", install=INSTALL)
        self._dom = require_package("miniwob.dom", install=INSTALL)
        self._selenium = require_package("selenium.webdriver", install=INSTALL)
        self._connection = require_package("selenium.webdriver.chromium.remote_connection", install=INSTALL)
        self._failures = (
            require_package("selenium.common.exceptions", install=INSTALL).WebDriverException,
            require_package("urllib3.exceptions", install=INSTALL).HTTPError,
            OSError,
        )
        self._process = OwnProcess(name="miniwob")
        launcher = self._process.folder / "chromium"
        write_launcher(launcher, pages=pages, sites=())
        self._process.start(
            [CHROMEDRIVER, "--port=0"], env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(launcher.parent)}
        )
        self._thread = OwnThread("miniwob")
        self._driver: Any = None  # lives in the thread

    async def open(self, page: str, *, seed: int, mode: str) -> PageState:
        """Start an episode. `mode` is MiniWoB++'s: train or test."""
        return await self._call(lambda: self._open(page, seed, mode))

    async def do(self, action: PageAction) -> PageState:
        return await self._call(lambda: self._do(action))

    def end(self) -> None:
        """Kill the browser, also in the middle of a call: the thread then ends too."""
        self._process.end()
        self._thread.end()

    async def _call(self, function: Callable[[], T]) -> T:
        try:
            return await self._thread.call(function)
        except self._failures as error:
            reason = str(error).partition("Stacktrace")[0].strip()
            log = self._process.log_tail()
            raise EnvError(f"the browser failed: {type(error).__name__}: {reason}; its log: {log}") from error

    def _open(self, page: str, seed: int, mode: str) -> PageState:
        driver = self._driver = self._driver or self._connect()
        before = driver.current_window_handle
        driver.switch_to.new_window("tab")
        opened = driver.current_window_handle
        driver.switch_to.window(before)
        driver.close()
        driver.switch_to.window(opened)
        self._execute("Page.addScriptToEvaluateOnNewDocument", source=_NO_FRAMES)
        driver.get(f"file://{PAGES}/miniwob/{page}.html")
        self._execute("Emulation.setVirtualTimePolicy", policy="pause", initialVirtualTime=FIRST_MOMENT_S)
        driver.execute_script(_BEGIN, NO_END_MS, seed, mode)
        return self._look()

    def _do(self, action: PageAction) -> PageState:
        if action.kind in ("click", "type"):
            self._actions.execute_click_element(action.ref, self._driver)
        if action.kind == "type":
            self._actions.execute_type_text(action.text, self._driver)
        if action.kind == "press":
            self._actions.execute_press_key(action.text, self._driver)
        return self._look()

    def _look(self) -> PageState:
        """Advance the page's clock until the page is ready, and read the page."""
        self._pass_time()
        while not (seen := self._driver.execute_script(_LOOK))["ready"]:
            self._pass_time()
        utterance = seen["utterance"]
        return PageState(
            utterance=utterance["utterance"] if isinstance(utterance, dict) else utterance,
            body=None if seen["done"] else self._dom.DOMElement(seen["body"]),
            reward=float(seen["reward"]) if seen["done"] else 0.0,
            is_over=seen["done"],
        )

    def _pass_time(self) -> None:
        until = self._driver.execute_script("return Date.now()") + TURN_MS
        self._execute("Emulation.setVirtualTimePolicy", policy="advance", budget=TURN_MS)
        while self._driver.execute_script("return Date.now()") < until:
            pass

    def _execute(self, command: str, **params: Any) -> None:
        """Execute a command of the Chrome DevTools Protocol, which WebDriver does not have."""
        self._driver.execute("executeCdpCommand", {"cmd": command, "params": params})

    def _connect(self) -> Any:
        """Start a WebDriver session. chromedriver uses a pipe to Chromium, because there is no network between them."""
        options = self._selenium.ChromeOptions()
        options.binary_location = str(self._process.folder / "chromium")
        options.unhandled_prompt_behavior = "accept"
        for argument in ("headless", "disable-gpu", "remote-debugging-pipe"):
            options.add_argument(argument)
        connection = self._connection.ChromiumRemoteConnection(
            f"http://127.0.0.1:{self._port()}", vendor_prefix="goog", browser_name="chrome", ignore_proxy=True
        )
        return self._selenium.Remote(command_executor=connection, options=options)

    def _port(self) -> int:
        deadline = time.monotonic() + START_S
        while (found := _PORT.search(self._process.log_tail())) is None:
            if self._process.is_over or time.monotonic() > deadline:
                raise EnvError(f"chromedriver did not start; its log: {self._process.log_tail()}")
            time.sleep(POLL_S)
        return int(found[1])
