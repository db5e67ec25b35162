"""One actor process: `python -m actors NAME [config.yaml] [section.key=value ...]`.

Its own settings say where the run is and what kind of actor this is; everything else, the run says in Redis.
"""

import asyncio
import logging
import os
import sys
import zlib
from pathlib import Path

from actors.act import act, make_stage
from actors.engine import EngineDied
from actors.join import checked_key, run_config, wait_for_run
from actors.orders import engine_settings
from actors.receive import ReceiverInfo
from actors.vllm_engine import EngineProcess, VllmEngine
from common.config import Config, load_config
from common.config_error import ConfigError
from common.connection import RedisUnreachable, connect, connect_shards, without_password
from common.curve import load_key
from common.shutdown import LEAVE_S, Shutdown
from envhub.catalogue import make_any_env
from replay.buffer import Buffer
from replay.bulletin import Bulletin
from replay.fleet import Fleet, RunFacts, UnknownRun
from replay.keys import shard_name

log = logging.getLogger("actors")


def main(name: str, settings: list[str]) -> int:
    """Return the exit code: 0 the run is over, 1 engine or learner failed, 2 bad input, 75 told to leave."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    shutdown = Shutdown()
    try:
        with shutdown.nothing_to_lose():
            mine = own_config(settings)
            load_key(mine.weights.key_file)
            client = connect(mine.redis.url, ending=shutdown.requested)
            fleet = Fleet(client, mine.run.name)
            # It takes 10 s to import vLLM; the learner meanwhile makes the model that this actor waits for.
            process = EngineProcess()
            facts = wait_for_run(fleet, mine.actors.join_timeout_s)
            run = run_config(facts)
            checked_key(run)  # the engine's process finds it in the environment
            check_host(run, Path(facts.model_path))
            engine = start_engine(process, name, run=run, mine=mine, facts=facts)
    except (ConfigError, RedisUnreachable, UnknownRun) as error:
        print(f"slipstream actors: {error}", file=sys.stderr)
        return 2
    shards = connect_shards(mine.redis.url, run.redis.shards, ending=shutdown.requested)
    streams = [("eval", 0), *(("train", shard) for shard in range(len(shards)))]  # the learner waits for evaluations
    buffers = {
        shard_name(stream, shard): Buffer(
            shards[shard],
            run.run.name,
            stream=stream,
            shard=shard,
            vocab_size=facts.vocab_size,
            lease_ttl_s=run.replay.lease_ttl_s,
            max_attempts=run.replay.max_attempts,
            max_trajectory_bytes=run.replay.max_trajectory_bytes,
            compress=run.replay.compress,
        )
        for stream, shard in streams
    }
    stage = make_stage(engine, name=name, run=run, actors=mine.actors, model_path=Path(facts.model_path))

    shutdown.end_within(mine.actors.drain_s + LEAVE_S)

    async def play() -> int:
        try:
            return await act(
                stage,
                buffers=buffers,
                bulletin=Bulletin(client, run.run.name),
                fleet=fleet,
                actors=mine.actors,
                shutdown=shutdown,
            )
        finally:
            await engine.close()

    try:
        return asyncio.run(play())
    except EngineDied as error:
        log.error("the actor ends with its engine, for its supervisor to start another: %s", error)
        return 1


def own_config(settings: list[str]) -> Config:
    """This actor's own settings, from a file and overrides."""
    files = [setting for setting in settings if "=" not in setting]
    config = load_config(files[0] if files else None, [setting for setting in settings if "=" in setting])
    config.redis.url = without_password(config.redis.url)
    return config


def check_host(run: Config, model_folder: Path) -> None:
    """Raise ConfigError unless this host has what the run needs of it: the model's folder and the environment."""
    if not (model_folder / "config.json").is_file():
        raise ConfigError(f"the run's model folder {model_folder} is not on this host; share or copy it")
    try:
        for part in run.env.parts().values():
            asyncio.run(make_any_env(part.name, part.options).close())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def start_engine(process: EngineProcess, name: str, *, run: Config, mine: Config, facts: RunFacts) -> VllmEngine:
    """A vLLM engine that will serve from the first offered version on: what the folder holds has no number."""
    disk = mine.weights.disk or run.weights.disk
    if mine.actors.transport == "disk" and not disk:
        raise ConfigError("`actors.transport` is disk, and the run has no `weights.disk`; use broadcast or pull")
    settings = engine_settings(
        run,
        mine.actors,
        model_path=facts.model_path,
        policy_version=-1,
        seed=zlib.crc32(f"{run.run.seed}/{name}".encode()),
        receiver=ReceiverInfo(
            redis_url=mine.redis.url,
            run_id=run.run.name,
            actor=name,
            transport=mine.actors.transport,
            chunk_bytes=run.weights.chunk_bytes,
            timeout_s=2 * run.weights.broadcast_timeout_s,
            disk=disk,
        ),
    )
    try:
        return VllmEngine(process, settings)
    except ValueError as error:
        raise ConfigError(f"vLLM refuses the model or the sizes that it was given: {error}") from None


if __name__ == "__main__":
    exit_code = main(sys.argv[1], sys.argv[2:])
    # Not sys.exit: the interpreter takes a second to clear torch's heap, which a preempted actor may not have.
    os._exit(exit_code)
