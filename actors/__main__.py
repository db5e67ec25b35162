"""One actor process: `python -m actors NAME [config.yaml] [section.key=value ...]`.

Its own settings say where the run is and what kind of actor this is; everything else, the run says in Redis.
"""

import asyncio
import importlib
import logging
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

from actors.act import act, make_stage
from actors.receive import ReceiverInfo
from actors.vllm_engine import VllmEngine, prepare_environment
from common.config import Config, ConfigError, load_config
from common.connection import RedisUnreachable, connect_or_explain
from common.shutdown import Shutdown, die_with_parent
from replay.buffer import Buffer
from replay.bulletin import Bulletin
from replay.fleet import Fleet, RunFacts, UnknownRun

JOIN_POLL_S = 0.2

log = logging.getLogger("actors")


def main(name: str, settings: list[str]) -> int:
    """Return the exit code: 0 the run is over, 2 bad input, 75 told to leave."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    shutdown = Shutdown()
    try:
        files = [setting for setting in settings if "=" not in setting]
        mine = load_config(files[0] if files else None, [setting for setting in settings if "=" in setting])
        client = connect_or_explain(mine.redis.url)
        fleet = Fleet(client, mine.run.name)
        # vLLM takes 10 s to import; the learner meanwhile makes the model that this actor waits for.
        importing = threading.Thread(target=importlib.import_module, args=("vllm",), daemon=True)
        importing.start()
        facts = wait_for_run(fleet, mine.actors.join_timeout_s, shutdown)
        if facts is None:
            return shutdown.exit_code
        if not (Path(facts.model_path) / "config.json").is_file():
            raise ConfigError(f"the run's model folder {facts.model_path} is not on this host; share or copy it")
    except (ConfigError, RedisUnreachable, UnknownRun) as error:
        print(f"slipstream actors: {error}", file=sys.stderr)
        return 2
    run = run_config(facts)
    importing.join()
    engine = start_engine(name, run=run, mine=mine, facts=facts)
    buffers = {
        stream: Buffer(
            client,
            run.run.name,
            stream=stream,
            vocab_size=facts.vocab_size,
            lease_ttl_s=run.replay.lease_ttl_s,
            max_attempts=run.replay.max_attempts,
            max_trajectory_bytes=run.replay.max_trajectory_bytes,
        )
        for stream in ("eval", "train")  # evaluations first: the learner waits for them
    }
    stage = make_stage(engine, name=name, run=run, actors=mine.actors, model_path=Path(facts.model_path))

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

    return asyncio.run(play())


def wait_for_run(fleet: Fleet, timeout_s: float, shutdown: Shutdown) -> RunFacts | None:
    """What the run's learner says about it; None when told to stop. Raises UnknownRun after `timeout_s`.

    Actors may be started first, so a run that is not there yet is waited for, aloud.
    """
    deadline, said = time.monotonic() + timeout_s, False
    while not shutdown.requested.is_set():
        try:
            return fleet.run_facts()
        except UnknownRun as error:
            if time.monotonic() > deadline:
                raise
            if not said:
                log.info("waiting up to %.0f s for the learner: %s", timeout_s, error)
                said = True
            shutdown.requested.wait(JOIN_POLL_S)
    return None


def run_config(facts: RunFacts) -> Config:
    """The run's configuration, as its learner has it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(facts.config_yaml)
        file.flush()
        return load_config(file.name, [])


def start_engine(name: str, *, run: Config, mine: Config, facts: RunFacts) -> VllmEngine:
    """A vLLM engine that will serve from the first offered version on: what the folder holds has no number."""
    return VllmEngine(
        facts.model_path,
        policy_version=-1,
        seed=zlib.crc32(f"{run.run.seed}/{name}".encode()),
        max_tokens=run.model.max_tokens,
        dtype=run.model.dtype,
        kv_cache_bytes=mine.actors.kv_cache_bytes,
        max_episodes=mine.actors.max_episodes,
        kv_policy=mine.actors.kv_policy,
        receiver=ReceiverInfo(
            redis_url=mine.redis.url,
            run_id=run.run.name,
            actor=name,
            transport=mine.actors.transport,
            chunk_bytes=run.weights.chunk_bytes,
            timeout_s=2 * run.weights.broadcast_timeout_s,
        ),
    )


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1], sys.argv[2:]))
