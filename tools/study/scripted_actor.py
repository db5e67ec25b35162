"""An actor process whose engine is scripted: `python -m tools.study.scripted_actor NAME [section.key=value ...]`.

Everything but the engine is that of `python -m actors`. Tokens are random, and their number depends on the seed alone.
"""

import os
import random
import sys

from actors.__main__ import own_config
from actors.act import act, make_setup
from actors.event_loop import run as run_loop
from actors.join import checked_tokenizer, run_config, wait_for_run
from actors.scripted_engine import Schedule, ScriptedEngine
from common.chat import end_tokens
from common.connection import connect
from common.log import log_to_stderr
from common.shutdown import Shutdown
from replay.actor_buffer import ActorBuffer
from replay.bulletin import Bulletin
from replay.fleet import Fleet

SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.03)


def main(name: str, settings: list[str]) -> int:
    """Play until the run is over; return the exit code of `act`."""
    log_to_stderr()
    shutdown, mine = Shutdown(), own_config(settings)
    client = connect(mine.redis.url, ending=shutdown.requested)
    fleet = Fleet(client, mine.run.name)
    facts = wait_for_run(fleet, mine.actors.join_timeout_s)
    run = run_config(facts)
    tokenizer = checked_tokenizer(facts, run)
    end = min(end_tokens(tokenizer))

    def script(_: list[int], seed: int | None) -> list[int]:
        """A turn of 1 to 15 tokens, few of them long."""
        chance = random.Random(seed)
        num_tokens = min(15, 1 + int(chance.expovariate(0.25)))
        return [chance.randrange(10, facts.vocab_size) for _ in range(num_tokens)] + [end]

    engine = ScriptedEngine(script, policy_version=-1, schedule=SCHEDULE, max_tokens=run.model.max_tokens)
    buffers = {
        stream: ActorBuffer(client, run.run.name, run.replay, vocab_size=facts.vocab_size, stream=stream)
        for stream in ("eval", "train")
    }
    setup = make_setup(engine, name=name, run=run, actors=mine.actors, tokenizer=tokenizer)
    return run_loop(
        act(
            setup,
            buffers=buffers,
            bulletin=Bulletin(client, run.run.name),
            fleet=fleet,
            actors=mine.actors,
            shutdown=shutdown,
        )
    )


if __name__ == "__main__":
    exit_code = main(sys.argv[1], sys.argv[2:])
    os._exit(exit_code)  # as `python -m actors` does
