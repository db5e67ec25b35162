"""One actor process: `python -m slipstream.actors NAME [config.yaml] [section.key=value ...]`.

Its own settings name the run and define the kind of actor; all other settings come from the run's facts in Redis.
"""

import logging
import os
import sys
import zlib
from collections.abc import Callable
from functools import partial

import redis

from slipstream.actors.engine.engine import Engine, EngineDied
from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.host.act import EXIT_RUN_FAILED, act, make_setup
from slipstream.actors.host.beat import RunChanged
from slipstream.actors.host.event_loop import run as run_loop
from slipstream.actors.host.host_parts import check_environments, checked_tokenizer, model_folder
from slipstream.actors.host.join import checked_key, run_config, wait_for_run
from slipstream.actors.host.model_cache import ModelUnavailable
from slipstream.actors.host.rehearse import check_template
from slipstream.actors.host.watchdog import LEASE_TIMES, watch
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import RedisUnreachable, connect, without_password
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.printable import printable_block
from slipstream.common.process.redis_retry import RedisAway
from slipstream.common.process.shutdown import LEAVE_S, Shutdown
from slipstream.common.transfer.encryption import load_key
from slipstream.envhub.rewards.part import actors_judge, book_on
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.buffer.judge_buffer import JudgeBuffer
from slipstream.replay.fleet.bulletin import BROADCAST_TIMEOUT_S, Bulletin
from slipstream.replay.fleet.fleet import Fleet, UnknownRun
from slipstream.replay.fleet.judge_account import JudgeAccount

log = logging.getLogger("actors")

StartEngine = Callable[..., Engine]


def begin_vllm() -> StartEngine:
    """Start the engine process, which imports vLLM for 10 s; return the function that makes it load a model."""
    return partial(start_engine, EngineProcess())


def main(name: str, settings: list[str], begin: Callable[[], StartEngine] = begin_vllm) -> int:
    """Run one actor; return 0 if the run is over, 1 if it must be started again, 2 for bad input, 75 if preempted."""
    log_to_stderr()
    shutdown = Shutdown()
    try:
        with shutdown.nothing_to_lose():
            mine = own_config(settings)
            load_key(mine.weights.key_file)
            client = connect(mine.redis.url, ending=shutdown.requested)
            fleet = Fleet(client, mine.run.name)
            start = begin()  # now, while the learner makes the model
            facts = wait_for_run(fleet, mine.actors.join_timeout_s)
            run = run_config(facts)
            checked_key(run)  # the engine process reads the key from the environment
            check_environments(run, facts)
            bulletin = Bulletin(client, run.run.name)
            folder = model_folder(facts, run, mine, bulletin, name=name)
            tokenizer = checked_tokenizer(facts, run, folder)
            check_template(run, tokenizer)
            engine = start(name, run=run, mine=mine, model_path=str(folder))
    except (ConfigError, RedisUnreachable, UnknownRun) as error:
        print(printable_block(f"slipstream actors: {error}"), file=sys.stderr)
        return 2
    except (ModelUnavailable, EngineDied, RedisAway) as error:
        cure = "; start that server, or correct `redis.url`" if isinstance(error, RedisAway) else ""
        log.error("the actor did not start, and ends; its supervisor starts another one: %s%s", error, cure)
        return 1
    buffers = buffers_to_play(client, run, vocab_size=facts.vocab_size)
    setup = make_setup(engine, name=name, run=run, actors=mine.actors, tokenizer=tokenizer)
    parts = setup.scoring.parts.values() if setup.scoring else ()
    book_on(JudgeAccount(client, run.run.name).add, parts)
    judged = JudgeBuffer(client, run.run.name, run.replay, vocab_size=facts.vocab_size) if actors_judge(parts) else None
    shutdown.end_within(mine.actors.drain_s + LEAVE_S)

    async def play() -> int:
        watch(limit_s=LEASE_TIMES * run.replay.lease_ttl_s)
        try:
            return await act(
                setup,
                buffers=buffers,
                bulletin=bulletin,
                fleet=fleet,
                actors=mine.actors,
                shutdown=shutdown,
                judge_buffer=judged,
                play_root=facts.play_root(),
            )
        finally:
            await engine.close()

    try:
        return run_loop(play())
    except RunChanged as error:
        log.warning("the learner was started again with other settings or code, so this actor joins again: %s", error)
        return EXIT_RUN_FAILED
    except (EngineDied, RedisAway, UnknownRun) as error:
        log.error("the actor ends, and its supervisor starts another one: %s", error)
        return 1


def buffers_to_play(client: redis.Redis, run: Config, *, vocab_size: int) -> dict[str, ActorBuffer]:
    """The buffers whose groups this actor plays, evaluations first: the learner waits for them."""
    return {
        stream: ActorBuffer(client, run.run.name, run.replay, vocab_size=vocab_size, stream=stream)
        for stream in ("eval", "train")
    }


def own_config(settings: list[str]) -> Config:
    """Load this actor's own settings from a file and overrides. Raises ConfigError."""
    files = [setting for setting in settings if "=" not in setting]
    config = load_config(files[0] if files else None, [setting for setting in settings if "=" in setting])
    config.redis.url = without_password(config.redis.url)
    return config


def start_engine(process: EngineProcess, name: str, *, run: Config, mine: Config, model_path: str) -> VllmEngine:
    """Start a vLLM engine. It serves from the first offered version on; the folder's weights have no version number."""
    settings = EngineSettings(
        model=run.model,
        actors=mine.actors,
        model_path=model_path,
        policy_version=-1,
        seed=zlib.crc32(f"{run.run.seed}/{name}".encode()),
        receiver=ReceiverInfo(
            redis_url=mine.redis.url,
            run_id=run.run.name,
            actor=name,
            transport=mine.actors.transport,
            timeout_s=2 * BROADCAST_TIMEOUT_S,
        ),
    )
    try:
        return VllmEngine(process, settings)
    except ValueError as error:
        raise ConfigError(f"vLLM refuses the model or the configured sizes: {error}") from None


if __name__ == "__main__":
    exit_code = main(sys.argv[1], sys.argv[2:])
    # Not sys.exit: the interpreter takes a second to clear torch's heap, and a preempted actor may not have a second.
    os._exit(exit_code)
