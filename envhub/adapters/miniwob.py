"""`miniwob`: the pages of MiniWoB++ in Debian's Chromium, with pages as text, and clicks and keys from text."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.miniwob_browser import INSTALL, MiniWobBrowser, PageState
from slipstream.envhub.adapters.miniwob_text import RULES, page_text, parse_action, shown_refs
from slipstream.envhub.env import Observation
from slipstream.envhub.env_options import check_known
from slipstream.envhub.isolation.chromium import require_chromium, require_readable
from slipstream.envhub.package import require_package
from slipstream.envhub.replayed_env import ReplayedEnv, answered
from slipstream.envhub.task_seed import task_rng


@dataclass(kw_only=True, slots=True)
class _Episode:
    task: Task
    look: PageState
    is_over: bool = False


class MiniWobEnv(ReplayedEnv[_Episode]):
    """One page. The reward component is `page`: its own, from -1 to 1, at the end; the score is that in [0, 1].

    Options: `game`, the page's name. Held-out tasks have other seeds, and use MiniWoB++'s own test data if the page has
    some.
    """

    def __init__(self, *, game: str = "enter-text") -> None:
        """Raises ValueError if MiniWoB++, Selenium, Chromium or the page is missing."""
        miniwob = require_package("miniwob", install=INSTALL)
        require_chromium()
        self._pages = Path(miniwob.__file__).parent / "html"
        require_readable(self._pages)
        self._keys = set(require_package("miniwob.constants", install=INSTALL).DEFAULT_ALLOWED_KEYS)
        self._game = game
        known = sorted(path.stem for path in (self._pages / "miniwob").glob("*.html"))
        check_known("game", game, known, of="MiniWoB++'s pages", usual="enter-text")
        self._browser: MiniWobBrowser | None = None

    async def reset(self, task: Task) -> Observation:
        seed = task_rng(task, world=f"miniwob/{self._game}").getrandbits(31)
        self._browser = self._browser or MiniWobBrowser(pages=self._pages)
        mode = "train" if task.split == "train" else "test"
        look = await self._browser.open(self._game, seed=seed, mode=mode)
        self._episode = _Episode(task=task, look=look)
        opening = f"{look.utterance}\n\n{page_text(look.body)}"
        return Observation(messages=(Message("system", RULES), Message("user", opening)), rewards={})

    async def step(self, action: str) -> Observation:
        episode = self._running()
        assert self._browser is not None
        parsed = parse_action(action, shown_refs(episode.look.body), self._keys)
        if parsed is None:
            return answered(f"no such action here\n{page_text(episode.look.body)}", {"page": 0.0}, valid=False)
        look = episode.look = await self._browser.do(parsed)
        episode.is_over = look.is_over
        text = "the task is over" if look.is_over else page_text(look.body)
        return answered(text, {"page": look.reward}, terminated=look.is_over, score=max(0.0, look.reward))

    async def close(self) -> None:
        browser, self._browser, self._episode = self._browser, None, None
        if browser is not None:
            await asyncio.to_thread(browser.end)
