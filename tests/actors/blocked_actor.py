"""An actor whose environment blocks in its first step: `python -m tests.actors.blocked_actor URL RUN_ID`."""

import asyncio
import logging
import sys
import time

from slipstream.actors.host.watchdog import watch
from slipstream.common.process.connection import connect
from slipstream.common.process.shutdown import Shutdown
from slipstream.envhub.env import Observation
from tests.actors.group.test_group import Actor, acting
from tests.guess import GuessEnv
from tests.replay.records.attempts import make_buffer

LEASE_TTL_S = 1.0


class BlockingEnv(GuessEnv):
    async def step(self, action: str) -> Observation:
        time.sleep(3600)  # noqa: ASYNC251 - it is meant
        return await super().step(action)


async def main(url: str, run_id: str) -> None:
    watch(limit_s=3 * LEASE_TTL_S)
    actor = Actor("blocked", run_id, env_name="tests.actors.blocked_actor:BlockingEnv")
    await acting(actor, make_buffer(connect(url), run_id, lease_ttl_s=LEASE_TTL_S), Shutdown())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(sys.argv[1], sys.argv[2]))
