"""Run one BrowserGym environment: `python -m slipstream.envhub.adapters.browsergym_worker FD LAUNCHER`, FD a socket.

BrowserGym uses one Playwright for a whole process, and Playwright belongs to one thread. So each environment has a
process. Requests and replies are JSON, one a line.
"""

import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

MAX_WAIT_MS = 5000
MAX_PAGE_CHARS = 20_000
MAX_WHY_CHARS = 2000

_NO_ACTIONS = ("upload_file", "mouse_upload_file")  # they would send this host's files to a site
_SUBSETS = ("chat", "infeas", "bid", "nav", "tab")  # BrowserGym's own default


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    game: str
    seed: int
    settings: dict[str, Any]


class DoAction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    action: str


class PageShown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the browser shows, and the reward."""

    rules: str
    goal: str
    page: str
    error: str  # why the last action failed; empty if it succeeded
    reward: float
    terminated: bool
    truncated: bool


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    why: str


BrowserRequest = Begin | DoAction
BrowserReply = PageShown | Failed


def module_of(game: str) -> str:
    """Return the module that registers `game`: browsergym.webarena for browsergym/webarena.4."""
    benchmark = game.removeprefix("browsergym/").partition(".")[0]
    return "browsergym.core" if benchmark == "openended" else f"browsergym.{benchmark}"


class _Player:
    def __init__(self) -> None:
        self._actions = _action_set()
        self._env: Any = None

    def answer(self, request: BrowserRequest) -> PageShown:
        match request:
            case Begin(game=game, seed=seed, settings=settings):
                return self._begin(game, seed, settings)
            case DoAction(action=action):
                observation, reward, terminated, truncated, _ = self._env.step(action)
                return self._shown(observation, float(reward), bool(terminated), bool(truncated))

    def _begin(self, game: str, seed: int, settings: Mapping[str, Any]) -> PageShown:
        if self._env is not None:
            self._env.close()
        importlib.import_module(module_of(game))
        gymnasium = importlib.import_module("gymnasium")
        self._env = gymnasium.make(game, action_mapping=self._to_code, **settings).unwrapped
        observation, _ = self._env.reset(seed=seed)
        return self._shown(observation, 0.0, False, False)

    def _to_code(self, action: str) -> str:
        parsers = importlib.import_module("browsergym.core.action.parsers")
        for found in parsers.highlevel_action_parser.search_string(action).as_list():
            for name, arguments in found:
                named = parsers.NamedArgument
                check_call(name, [given.value if isinstance(given, named) else given for given in arguments])
        return str(self._actions.to_python_code(action))

    def _shown(self, observation: Mapping[str, Any], reward: float, terminated: bool, truncated: bool) -> PageShown:
        return PageShown(
            rules=str(self._actions.describe(with_long_description=False, with_examples=True)).strip(),
            goal="\n".join(str(part.get("text") or f"[{part['type']}]") for part in observation["goal_object"]),
            page=_page(observation),
            error=str(observation["last_action_error"])[:MAX_WHY_CHARS],
            reward=reward,
            terminated=terminated,
            truncated=truncated,
        )


def check_call(name: str, arguments: Sequence[Any]) -> None:
    """Raise ValueError for an action that waits longer than a turn, or opens an address that is not a site.

    An address may be a script, and a policy's script could report that the task is solved.
    """
    if name == "noop" and not all(isinstance(ms, int | float) and ms <= MAX_WAIT_MS for ms in arguments):
        raise ValueError(f"noop waits for {MAX_WAIT_MS} ms at most")
    if name == "goto" and not all(str(url).startswith(("http://", "https://")) for url in arguments):
        raise ValueError("goto takes an address that begins with http:// or https://")


def _action_set() -> Any:
    highlevel = importlib.import_module("browsergym.core.action.highlevel")
    actions = [
        action
        for subset in _SUBSETS
        for action in highlevel.ACTION_SUBSETS[subset]
        if action.__name__ not in _NO_ACTIONS
    ]
    return highlevel.HighLevelActionSet(subsets=["custom"], custom_actions=actions, multiaction=False)


def _page(observation: Mapping[str, Any]) -> str:
    """Return the list of open tabs, if there is more than one, and the accessibility tree of the current tab."""
    tree = importlib.import_module("browsergym.utils.obs").flatten_axtree_to_str(observation["axtree_object"])
    # Newer versions of Chromium repeat each text, line by line.
    lines = [line for line in tree.splitlines() if not line.strip().startswith("InlineTextBox")]
    urls = observation["open_pages_urls"]
    if len(urls) > 1:
        lines = [*(f"tab {number}: {url}" for number, url in enumerate(urls)), f"shown: {observation['url']}", *lines]
    text = "\n".join(lines)
    return text if len(text) <= MAX_PAGE_CHARS else f"{text[:MAX_PAGE_CHARS]}\n[cut]"


def _use_chromium(launcher: Path) -> None:
    """Link `launcher` to the path where Playwright expects the browser that it downloads."""
    playwright = importlib.import_module("browsergym.core")._get_global_playwright()
    expected = Path(playwright.chromium.executable_path)
    if not expected.is_relative_to(launcher.parent):
        raise RuntimeError(f"Playwright starts {expected}, not a browser in PLAYWRIGHT_BROWSERS_PATH")
    expected.parent.mkdir(parents=True)
    expected.symlink_to(launcher)


def main(fd: int, launcher: Path) -> None:
    """Answer requests until the environment closes the socket."""
    with socket.socket(fileno=fd) as connection, connection.makefile("rwb") as stream:
        player: _Player | None = None
        for message in stream:
            reply: BrowserReply
            try:
                if player is None:
                    _use_chromium(launcher)
                    player = _Player()
                reply = player.answer(msgspec.json.decode(message, type=BrowserRequest))
            except Exception as error:  # BrowserGym's tasks may raise anything
                reply = Failed(why=f"{type(error).__name__}: {error}"[:MAX_WHY_CHARS])
            stream.write(msgspec.json.encode(reply) + b"\n")
            stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # Playwright's other processes end with the process group
