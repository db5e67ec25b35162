"""Starts an actor's engine for a benchmark: vLLM in a process, with a Redis server and a learner's connections."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.connection import connect
from slipstream.common.text.tokenizer import tokenizer_root
from slipstream.learner.lead.connections import Connections, join_run
from slipstream.replay.fleet.fleet import RunFacts
from slipstream.tools.lab.loopback_server import start_server
from slipstream.tools.run.prepare import load_tokenizer

TIMEOUT_S = 300.0


@contextmanager
def an_engine(config: Config, folder: Path, root: Path) -> Iterator[tuple[Connections, VllmEngine, EngineSettings]]:
    """Yield the learner's connections, the engine of the model in `folder` and its settings; `root` is the server's."""
    with start_server(root / "redis") as server:
        tokenizer = load_tokenizer(folder, config.model)
        facts = RunFacts(
            config_yaml=dump_config(config),
            model_path=str(folder),
            model_files=[],
            vocab_size=len(tokenizer),
            tokenizer_root=tokenizer_root(tokenizer),
            own_modules={},
        )
        connections = join_run(connect(server.secret_url), config, facts)
        receiver = ReceiverInfo(
            redis_url=server.secret_url, run_id=config.run.name, actor="actor", transport="pull", timeout_s=TIMEOUT_S
        )
        settings = EngineSettings(
            model=config.model,
            actors=config.actors,
            model_path=str(folder),
            policy_version=0,
            seed=config.run.seed,
            receiver=receiver,
        )
        engine = VllmEngine(EngineProcess(), settings)
        try:
            yield connections, engine, settings
        finally:
            asyncio.run(engine.close())
