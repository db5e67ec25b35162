"""`python -m tests.envhub.far_player URL`: keeps an episode open at an environment server until the process ends."""

import asyncio
import sys

from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env


async def main(url: str) -> None:
    env = make_env("remote", {"url": url, "env": "grid"})
    await env.reset(Task(env="grid", split="train", index=0))
    print("playing", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
