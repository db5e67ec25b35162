"""One engine of two workers that share every layer: what it says, and what becomes of it when weights come."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis
from transformers import Qwen3ForCausalLM

from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.transfer.weights import Offer, layout
from slipstream.learner.publisher.publish import Publisher
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.server.redis_server import Server
from slipstream.tools.lab.bench.weights_stage import publish_whole
from slipstream.tools.run.tiny_model import TinyShape
from tests.actors.forward_pass import probe_by
from tests.actors.generations import check_serves, check_spans, crossings_of
from tests.actors.vllm_engines import RECEIVER, Offers, Policies, make_policies, run, started
from tests.learner.publisher.offers import publisher_settings
from tests.waiting import until

RUN_ID = f"tensor-parallel-{os.getpid()}"  # of the whole file


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return make_policies(tmp_path_factory.mktemp("model") / "tiny", TinyShape(num_heads=4, num_kv_heads=2))


@pytest.fixture(scope="module")
def engine(policies: Policies, redis_server: Server) -> Iterator[VllmEngine]:
    """For the whole file, which runs in order: version 0, then 1, which is broadcast, then its end."""
    receiver = replace(RECEIVER, redis_url=redis_server.secret_url, run_id=RUN_ID, transport="broadcast")
    sizes = {"kv_cache_bytes": 16 << 20, "max_episodes": 16, "tensor_parallel": 2}
    engine = started(policies.folder, kv_policy="keep", receiver=receiver, **sizes)
    yield engine
    asyncio.run(engine.close())


def workers_of(engine: VllmEngine) -> list[psutil.Process]:
    return psutil.Process(engine._process._popen.pid).children(recursive=True)


def holders_of_received_weights(engine: VllmEngine) -> set[int]:
    """The pids of the engine's processes that keep received weights in host memory."""
    pids = [engine._process._popen.pid, *(worker.pid for worker in workers_of(engine))]
    files = (file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink())
    return {int(file.parts[2]) for file in files if "slipstream-received-weights" in str(file.readlink())}


async def broadcast(bulletin: Bulletin, publisher: Publisher, model: Qwen3ForCausalLM) -> Offer:
    """Publish `model` as version 1, once the engine's first worker wants broadcasts; return the offer."""
    await until(lambda: bulletin.broadcast_members() == ["a0"])
    weights = [(name, value.detach()) for name, value in model.named_parameters()]
    publish_whole(publisher, weights, policy_version=1, probe=probe_by(model))
    await until(lambda: bulletin.latest() is not None)
    return bulletin.latest()


def test_two_workers_agree_with_one_forward_pass(engine: VllmEngine, policies: Policies) -> None:
    check_serves(engine, policies.models[0], version=0)
    assert len(workers_of(engine)) >= 2


def test_corrupt_weights_are_refused_and_old_ones_go(engine: VllmEngine, policies: Policies, server: Offers) -> None:
    offer = server.offer(policies.models[2], policy_version=1)
    server.corrupt(offer)
    with pytest.raises(WeightsRefused):
        run(engine.stage(offer))
    check_serves(engine, policies.models[0], version=0)


def test_the_first_worker_receives_a_broadcast_for_both_and_both_commit_between_two_tokens(
    engine: VllmEngine, policies: Policies, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    new, bulletin = policies.models[1], Bulletin(redis_client, RUN_ID)
    entries = layout((name, "float32", tuple(value.shape)) for name, value in new.named_parameters())
    settings = publisher_settings(redis_url, RUN_ID, entries, learner_epoch=1, broadcast_timeout_s=60.0)
    with closing(Publisher(settings, log_path=tmp_path / "publisher.log")) as publisher:
        offer = run(broadcast(bulletin, publisher, new))
        crossings, _ = run(crossings_of(engine, offer))
        run(until(lambda: publisher.stats.num_broadcasts == 1))
        assert len(holders_of_received_weights(engine)) == 1, "a machine needs one host copy for all workers"
    for crossing in crossings:
        check_spans(crossing)
    check_serves(engine, new, version=1)


def test_workers_end_with_an_engine_that_is_killed(engine: VllmEngine) -> None:
    workers = workers_of(engine)
    assert len(workers) >= 2
    os.kill(engine._process._popen.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive and len(gone) == len(workers)
