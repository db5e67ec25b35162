"""Rank 0's books: what a checkpoint covers is settled when it is durable, and nothing before."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from common.config import Config
from common.run_dir import RunDir
from common.weights import layout
from learner.checkpoint import Progress
from learner.model.flops import Flops
from learner.lead import Lead
from learner.links import join_run
from replay.buffer import Buffer
from replay.fleet import Fleet
from replay.keys import FencedOut
from tests.attempts import attempt_at, ticket
from tests.every_verb import MEMBER

WEIGHTS = layout([("weight", "float32", (2,))])
START = Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0)


@pytest.fixture
def lead(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> Iterator[Lead]:
    lead = begin(redis_client, redis_url, run_id, tmp_path)
    yield lead
    lead.close()


def begin(client: redis.Redis, redis_url: str, run_id: str, root: Path) -> Lead:
    run_dir = RunDir(root, run_id)
    run_dir.create()
    config = config_of(run_id)
    links = join_run(client, config, model_folder=root, vocab_size=100)
    return Lead(
        links, config, run_dir, progress=START, conditions={}, weights=WEIGHTS, adapted=None, redis_url=redis_url,
        device="cpu", flops=Flops(per_token=1.0, per_pair=1.0, peak=None),
    )  # fmt: skip


def claim_one(lead: Lead, run_id: str, *, step: int) -> None:
    """Open a group, play it, and claim it for `step`."""
    buffer: Buffer = lead.shards[0]
    buffer.open([ticket(step)])
    lease = buffer.lease("a")
    assert lease is not None
    for member in lease.missing:
        buffer.insert(lease, attempt_at(lease, member, run_id=run_id))
    assert len(buffer.claim(step, 1, policy_version=0, max_lag=10)) == 1


def test_the_summary_tells_what_the_actors_cost_and_what_was_wasted(
    lead: Lead, redis_client: redis.Redis, run_id: str, tmp_path: Path
) -> None:
    fleet = Fleet(redis_client, run_id)
    fleet.beat(msgspec.structs.replace(MEMBER, price_per_hour=2.0, served_s=1800, generated_tokens=50, kept_tokens=20))
    fleet.leave(MEMBER.name)
    claim_one(lead, run_id, step=1)
    lead.shards[0].drop([1], "zero_variance")
    lead.write_summary()
    cost = json.loads(RunDir(tmp_path, run_id).summary.read_text())["cost"]
    assert (cost["dollars"], cost["dollars_per_million_tokens"], cost["tokens_trained"]) == (1.0, None, 0)
    assert cost["wasted_tokens"].keys() == {"preempted", "zero_variance"}
    assert cost["wasted_tokens"]["preempted"] == 30
    assert cost["wasted_tokens"]["zero_variance"] == lead.shards[0].ledger().tokens["dropped:zero_variance"] > 0


def test_a_step_is_settled_when_its_checkpoint_is_durable_and_later_ones_are_not(
    lead: Lead, run_id: str, tmp_path: Path
) -> None:
    run_dir, buffer = RunDir(tmp_path, run_id), lead.shards[0]
    claim_one(lead, run_id, step=1)
    settle = lead.prepare_checkpoint(msgspec.structs.replace(START, step=1))
    claim_one(lead, run_id, step=2)  # while the checkpoint is written
    assert (buffer.ledger().claimed, buffer.ledger().trained) == (2, 0)
    assert not run_dir.tally.exists()
    settle()
    assert (buffer.ledger().claimed, buffer.ledger().trained) == (1, 1)
    assert run_dir.tally.exists()


def test_a_learner_that_was_fenced_out_begins_no_checkpoint_and_settles_none(
    lead: Lead, redis_client: redis.Redis, run_id: str
) -> None:
    claim_one(lead, run_id, step=1)
    progress = msgspec.structs.replace(START, step=1)
    settle = lead.prepare_checkpoint(progress)
    join_run(redis_client, config_of(run_id), model_folder=Path(), vocab_size=100)
    with pytest.raises(FencedOut):
        settle()
    with pytest.raises(FencedOut):
        lead.prepare_checkpoint(progress)
    assert lead.shards[0].ledger().trained == 0


def config_of(run_id: str) -> Config:
    config = Config()
    config.run.name = run_id
    return config
