"""Plays the episodes that the pages of docs/environments show, and writes them there.

`python -m slipstream.tools.lab.docs.env_pages`. A page has the line `<!-- episode of NAME: OPTIONS, task INDEX -->`,
with OPTIONS as JSON. The text between it and `<!-- end of episode -->` is replaced by the real actions of the expert
and the real observations.
"""

import asyncio
import json
import re
from pathlib import Path

from slipstream.common.process.output import write_whole
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env

PAGES = Path(__file__).resolve().parents[3] / "docs" / "environments"
MAX_TURNS = 50

_EPISODE = re.compile(r"(<!-- episode of (\w+): (\{.*?\}), task (\d+) -->\n).*?(<!-- end of episode -->)", re.DOTALL)


def with_episodes(page: str) -> str:
    """Return `page` with its episodes played again. Raises ValueError for a page without an episode."""
    if _EPISODE.search(page) is None:
        raise ValueError("a page needs `<!-- episode of NAME: {}, task 0 -->` and `<!-- end of episode -->`")
    return _EPISODE.sub(_replaced, page)


def _replaced(found: re.Match[str]) -> str:
    text = asyncio.run(_episode(found[2], json.loads(found[3]), int(found[4])))
    indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"{found[1]}\n{indented}\n\n{found[5]}"


async def _episode(name: str, options: dict[str, object], index: int) -> str:
    """The expert's actions on a train task, each after `>`, and the observations, without the system message."""
    env = make_env(name, options)
    observation = await env.reset(Task(env=name, split="train", index=index))
    lines = [message.content for message in observation.messages if message.role != "system"]
    for _ in range(MAX_TURNS):
        action = env.expert()
        observation = await env.step(action)
        lines += ["> " + action.replace("\n", "\n> "), *(message.content for message in observation.messages)]
        if observation.done:
            break
    await env.close()
    return "\n".join([*lines, f"(score {observation.score:g})"])


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        write_whole(path, with_episodes(path.read_text()))


if __name__ == "__main__":
    main()
