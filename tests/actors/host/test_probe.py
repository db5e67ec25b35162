"""The probe of a version: what it holds, what an engine's scores of it suggest, and who hears of a refusal."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis
import torch
from transformers import Qwen3ForCausalLM

from slipstream.actors.engine.engine import EngineSpoiled
from slipstream.actors.host import refresh
from slipstream.actors.host.pin import Pin
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import MAX_TRIES, RefreshCounts, keep_fresh
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.common.process.wire import WireError, decode, encode
from slipstream.common.transfer.probe import MAX_PROBE_TOKENS, Probe, mismatch
from slipstream.common.transfer.weights import Offer, sealed
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.supply.refusals import REFUSED_S, AllRefuse, Refusals
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, Refusal
from slipstream.replay.records.failures import MAX_REASON_CHARS
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.learner.publisher.offers import empty_offer
from tests.replay.buffer.every_verb import MEMBER
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model

PROBE = Probe(tokens=[5, 6, 7, 8], logprobs=[-1.0, -2.0, -3.0], tolerance=0.01)
Refuse = Callable[[int], None]  # raises for a version that it refuses


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.002), ("bfloat16", 0.3)])
def test_a_probe_holds_the_models_own_log_chances(dtype: str, tolerance: float, tmp_path: Path, ranks: Ranks) -> None:
    settings = dataclasses.replace(FLOAT32, dtype=dtype, temperature=0.5, max_tokens=200)
    probe = probe_of(load_model(save_tiny_model(tmp_path), ranks=ranks, settings=settings), torch.device("cpu"))
    assert (len(probe.tokens), probe.tolerance) == (MAX_PROBE_TOKENS, tolerance)
    causal_lm = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor(probe.tokens)
    with torch.no_grad():
        expected = causal_lm(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert np.abs(np.array(probe.logprobs) - expected.numpy()).max() < (1e-4 if dtype == "float32" else 0.3)
    assert mismatch(probe, expected.tolist()) is None


def test_a_probe_leaves_room_for_a_token_in_a_short_context(tmp_path: Path, ranks: Ranks) -> None:
    settings = dataclasses.replace(FLOAT32, max_tokens=20)
    model = load_model(save_tiny_model(tmp_path), ranks=ranks, settings=settings)
    probe = probe_of(model, torch.device("cpu"))
    assert (len(probe.tokens), len(probe.logprobs), probe.tolerance) == (19, 18, 0.002)


@pytest.mark.parametrize(
    ("found", "former", "expected"),
    [
        ([-1.0, -2.009, -3.0], [], None),
        ([-1.0, -2.0, -3.2], [], r"by 0.0667 nats a token, by 0.2 at most .* the first 2 of 3 tokens agree"),
        ([-1.0, -2.0, -2.98], [], None),
        ([-1.02, -2.02, -3.02], [], "3 of 3 tokens differ, from the first on: suspect a weight or a buffer"),
        ([-4.0, -2.0, -3.0], [-4.001, -2.0, -3.0], "still those of the version before"),
        ([float("nan"), -2.0, -3.0], [], "not finite numbers"),
        ([-1.0, -2.0], [], "not finite numbers"),
    ],
)
def test_scores_are_judged_by_mean_and_worst(found: list[float], former: list[float], expected: str | None) -> None:
    why = mismatch(PROBE, found, former=former)
    if expected is None:
        assert why is None
    else:
        assert re.search(expected, why), why


@pytest.mark.parametrize(
    "damage", [{"tokens": [1] * (MAX_PROBE_TOKENS + 1)}, {"tokens": [-1, 3]}, {"tokens": [1]}, {"logprobs": []}]
)
def test_an_offer_with_a_malformed_probe_is_not_read(damage: dict[str, object]) -> None:
    manifest = sealed([], memoryview(b""), policy_version=1, learner_epoch=1, probe=PROBE)
    offer = Offer(manifest=manifest, pull_endpoint="tcp://127.0.0.1:1")
    assert decode(Offer, encode(offer)) == offer
    bad = msgspec.structs.replace(PROBE, **damage)
    with pytest.raises(WireError, match="probe"):
        decode(Offer, encode(msgspec.structs.replace(offer, manifest=msgspec.structs.replace(manifest, probe=bad))))


class RefusingEngine(ScriptedEngine):
    """Refuses versions as `refuse` says: it raises for a version, when it is staged or when it is committed."""

    def __init__(self, on_stage: Refuse = lambda version: None, on_commit: Refuse = lambda version: None) -> None:
        schedule = Schedule(token_time_s=0.0)
        super().__init__(lambda tokens, seed: [1], policy_version=-1, schedule=schedule, max_tokens=8)
        self.on_stage, self.on_commit = on_stage, on_commit
        self.staged: list[int] = []

    async def stage(self, offer: Offer) -> None:
        self.staged.append(offer.manifest.policy_version)
        self.on_stage(offer.manifest.policy_version)
        await super().stage(offer)

    async def commit(self, policy_version: int) -> float:
        self.on_commit(policy_version)
        return await super().commit(policy_version)


def refuses_3(error: Exception) -> Refuse:
    def refuse(version: int) -> None:
        if version == 3:
            raise error

    return refuse


class NoFurtherOffer(Exception):
    pass


async def refreshed(engine: RefusingEngine, offers: list[int], counts: RefreshCounts, pin: Pin) -> list[float]:
    """Offer each version of `offers` until it serves or is given up; return the waits in between."""
    waits_s, offered = list[float](), iter(offers)
    current = next(offered)

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)
        await asyncio.to_thread(lambda: None)

    def later(policy_version: int, *, wait_s: float) -> Offer | None:
        nonlocal current
        if current > policy_version:
            return empty_offer(current)
        if (current := next(offered, -1)) < 0:
            raise NoFurtherOffer
        return None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(refresh.asyncio, "sleep", sleep)
        with contextlib.suppress(NoFurtherOffer):
            await keep_fresh(engine, later, counts, pin, PollInterval())
    return waits_s


@pytest.mark.parametrize("where", ["stage", "commit"])
def test_a_version_that_does_not_fit_is_tried_a_few_times_and_the_next_one_soon(where: str) -> None:
    engine = RefusingEngine(**{f"on_{where}": refuses_3(WeightsUnfit("version 3 is refused by its probe"))})
    counts, pin = RefreshCounts(), Pin()
    waits_s = asyncio.run(refreshed(engine, [3, 3], counts, pin))
    assert engine.staged == [3] * MAX_TRIES and waits_s == [1.0, 2.0, 4.0]
    assert counts.refusal == Refusal(policy_version=3, reason="version 3 is refused by its probe", unfit=True)
    assert pin.stuck and engine.policy_version == -1
    asyncio.run(refreshed(engine, [4, 4], counts, pin))
    assert engine.policy_version == 4 and counts.refusal is None and not pin.stuck


def test_weights_that_do_not_arrive_are_tried_again_ever_less_often() -> None:
    left = iter([WeightsRefused("no source")] * 7)

    def refuse(version: int) -> None:
        if error := next(left, None):
            raise error

    engine, counts = RefusingEngine(on_stage=refuse), RefreshCounts()
    waits_s = asyncio.run(refreshed(engine, [3, 3], counts, Pin()))
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] and engine.policy_version == 3
    assert counts.refusal is None


def test_an_engine_that_has_no_right_weights_any_more_is_reported_and_ends_its_actor() -> None:
    engine, counts = RefusingEngine(on_commit=refuses_3(EngineSpoiled("of 9 nats"))), RefreshCounts()
    with pytest.raises(EngineSpoiled):
        asyncio.run(refreshed(engine, [3], counts, Pin()))
    assert counts.refusal == Refusal(policy_version=3, reason="of 9 nats", unfit=True)


class Watched:
    """A run whose newest version is 7, and whose actors report what a test says."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.fleet, self.now = Fleet(client, run_id), 0.0
        bulletin = Bulletin(client, run_id)
        client.hset(f"slipstream:{{{run_id}}}:weights:version", mapping={"policy_version": 7})
        self.refusals = Refusals(self.fleet, bulletin, clock=lambda: self.now)
        assert bulletin.highest_version() == 7

    def beat(self, name: str, *, version: int | None, unfit: bool = True) -> None:
        refusal = None if version is None else Refusal(policy_version=version, reason=f"{name} says why", unfit=unfit)
        self.fleet.beat(msgspec.structs.replace(MEMBER, name=name, refusal=refusal))

    def wait(self, seconds: float) -> None:
        """The learner waits for a batch for so long, and looks each second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.refusals.check()


@pytest.fixture
def watched(redis_client: redis.Redis, run_id: str) -> Watched:
    return Watched(redis_client, run_id)


def test_a_run_ends_when_all_refuse_the_newest_version(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.beat("a", version=7)
    watched.wait(REFUSED_S - 1)
    watched.beat("b", version=None)
    watched.wait(2 * REFUSED_S)
    watched.beat("b", version=7)
    with pytest.raises(AllRefuse, match="all 2 actors have refused version 7, the newest, for 15 s; a: a says why"):
        watched.wait(REFUSED_S + 2)
    assert [record.getMessage() for record in caplog.records] == ["actor a: a says why", "actor b: b says why"]


@pytest.mark.parametrize(("version", "unfit"), [(6, True), (7, False)])
def test_refusals_of_an_older_version_or_by_a_network_end_no_run(watched: Watched, version: int, unfit: bool) -> None:
    watched.beat("a", version=version, unfit=unfit)
    watched.wait(3 * REFUSED_S)


def test_the_reason_of_an_actor_that_has_left_is_known(watched: Watched) -> None:
    watched.beat("a", version=7)
    watched.fleet.leave("a")
    assert watched.refusals.last_reason() == "a: a says why"


def test_a_reason_is_as_long_as_a_heartbeat_may_carry() -> None:
    engine, counts = RefusingEngine(on_stage=refuses_3(WeightsUnfit("x" * 5000))), RefreshCounts()
    asyncio.run(refreshed(engine, [3, 3], counts, Pin()))
    member = msgspec.structs.replace(MEMBER, refusal=counts.refusal)
    assert decode(type(member), encode(member)).refusal.reason == "x" * MAX_REASON_CHARS
