"""Rank 0's ledger: claims are settled when a checkpoint that covers them is durable, and not before."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.headline import progress_line
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.transfer.weights import Adapted, layout
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.connections import Connections, join_run
from slipstream.learner.lead.lead import Lead
from slipstream.learner.lead.tally import load_highest_version, load_tally, tally_at
from slipstream.learner.supply.supply import Supply
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.ticket import Group
from slipstream.tools.see.summary import read_summary, summary_rows
from tests.learner.lead.test_report import STEP, TIMES_S, UNKNOWN
from tests.learner.publisher.offers import empty_offer, publisher_settings
from tests.learner.supply.test_supply import ahead_of, work
from tests.replay.buffer.every_verb import FACTS, MEMBER
from tests.replay.records.attempts import leased, make_buffer, ticket

WEIGHTS = layout([("weight", "float32", (2,))])
START = Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0)


class Place:
    """A run's folder and its names in Redis, where one learner after the other begins."""

    def __init__(self, client: redis.Redis, redis_url: str, run_id: str, root: Path) -> None:
        self.client, self.redis_url, self.run_id = client, redis_url, run_id
        self.dir = RunDir(root, run_id)
        self.dir.create()
        self.config = Config()
        self.config.run.name = run_id
        self.views = make_buffer(client, run_id)

    def join(self) -> Connections:
        facts = msgspec.structs.replace(FACTS, config_yaml=dump_config(self.config))
        return join_run(self.client, self.config, facts)

    def taken(self) -> Fence:
        fence = Fence(self.dir.checkpoints)
        fence.take()
        return fence

    def begin(
        self,
        connections: Connections | None = None,
        fence: Fence | None = None,
        *,
        progress: Progress = START,
        adapted: Adapted | None = None,
    ) -> Lead:
        """A learner at `progress`; its connections and its fence are new ones unless they are given."""
        connections = connections or self.join()
        settings = {"learner_epoch": connections.epoch, "adapted": adapted}
        publishing = publisher_settings(self.redis_url, self.run_id, WEIGHTS, **settings)
        others = {"progress": progress, "conditions": {}, "flops": UNKNOWN, "decode": str}
        return Lead(connections, self.config, self.dir, publishing=publishing, fence=fence or self.taken(), **others)

    def claim_one(self, lead: Lead, *, step: int) -> list[Group]:
        """Open a group, play it, and claim it for `step`."""
        buffer = lead.connections.train
        buffer.open([ticket(step)])
        self.views.insert(leased(self.views))
        groups = buffer.claim(step, 1, policy_version=0, max_lag=10)
        assert len(groups) == 1
        return groups

    def play_and_record(self, lead: Lead, *, step: int, as_step: int = 0) -> None:
        """Play a group, claim it for `step`, and record that step, or `as_step`."""
        batch = Batch(groups=self.claim_one(lead, step=step), num_dropped={}, next_group_id=step + 1)
        lead.record_step(batch, STEP, after((as_step or step) - 1), TIMES_S)

    def produced(self) -> list[tuple[float, float]]:
        """The episodes of each recorded step."""
        return [(record["step"], record["produced/episodes"]) for record in read_metrics(self.dir.metrics)]


def after(step: int) -> Progress:
    return msgspec.structs.replace(START, step=step)


@pytest.fixture
def place(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> Place:
    return Place(redis_client, redis_url, run_id, tmp_path)


@pytest.fixture
def lead(place: Place) -> Iterator[Lead]:
    with closing(place.begin()) as lead:
        yield lead


def test_the_summary_tells_what_the_actors_cost_and_what_was_wasted(place: Place, lead: Lead) -> None:
    fleet = Fleet(place.client, place.run_id)
    fleet.beat(msgspec.structs.replace(MEMBER, price_per_hour=2.0, served_s=1800, generated_tokens=50, kept_tokens=20))
    fleet.leave(MEMBER.name)
    place.claim_one(lead, step=1)
    lead.connections.train.drop([1], "zero_variance")
    lead.write_summary()
    cost = json.loads(place.dir.summary.read_text())["cost"]
    assert (cost["dollars"], cost["dollars_per_million_tokens"], cost["tokens_trained"]) == (1.0, None, 0)
    assert cost["wasted_tokens"].keys() == {"preempted", "zero_variance"}
    assert cost["wasted_tokens"]["preempted"] == 30
    assert cost["wasted_tokens"]["zero_variance"] == lead.connections.train.ledger().tokens["dropped:zero_variance"] > 0


def test_success_is_of_all_finished_episodes_unless_named_trained(place: Place, lead: Lead, shutdown: Shutdown) -> None:
    """Both members of groups 0 and 1 succeed, which teaches nothing; of groups 2 and 3 one each, which are trained."""
    settings = load_config(None, ["replay.group_size=2", "replay.groups_per_step=2", "replay.target_lag=1"])
    supply = Supply(lead.connections.train, settings, first_group_id=0)
    supply.admit(1, [], published_version=0)
    work(place.views, returns=lambda group_id: (1.0, 1.0) if group_id < 2 else (0.0, 1.0))
    batch = supply.next_batch(ahead_of(1), shutdown)
    assert batch is not None and batch.num_dropped == {"zero_variance": 2}
    lead.record_step(batch, STEP, START, TIMES_S)
    (record,) = read_metrics(place.dir.metrics)
    assert (record["produced/episodes"], record["produced/success"], record["produced/reward"]) == (8, 0.75, 0.75)
    assert (record["trained/success"], record["trained/reward"]) == (0.5, 0.5)
    assert "success 0.750 (0.41 to 0.93)  reward 0.750  trained success 0.500" in progress_line([record])
    lead.write_summary()
    summary = json.loads(place.dir.summary.read_text())
    assert (summary["produced"]["num_episodes"], summary["produced"]["success"]) == (8, 0.75)
    written = read_summary(place.dir)
    assert summary_rows(written)["success of 8 episodes near the end"] == "75.0%, between 40.9% and 92.9% (95 %)"


def test_every_episode_is_in_one_record_also_of_steps_made_again_and_after_a_server_was_emptied(place: Place) -> None:
    """The first learner dies with step 2 recorded and a checkpoint of step 1."""
    first = place.begin()
    place.play_and_record(first, step=1)
    first.prepare_checkpoint(after(1))()
    place.play_and_record(first, step=2)
    first.close()
    resumed = place.begin(progress=after(1))
    place.play_and_record(resumed, step=3, as_step=2)
    resumed.close()
    assert place.produced() == [(1, 2), (2, 4)]
    assert resumed.connections.train.ledger().inserted == 6
    place.client.flushdb()
    emptied = place.begin(progress=after(1))
    place.play_and_record(emptied, step=2)
    emptied.close()
    assert place.produced() == [(1, 2), (2, 2)]


def test_only_a_step_with_a_durable_checkpoint_is_settled_and_none_once_fenced_out(place: Place, lead: Lead) -> None:
    buffer = lead.connections.train
    place.claim_one(lead, step=1)
    settle = lead.prepare_checkpoint(after(1))
    place.claim_one(lead, step=2)  # while the checkpoint is written
    assert (buffer.ledger().claimed, buffer.ledger().trained) == (2, 0)
    assert not place.dir.tally.exists()
    settle()
    assert (buffer.ledger().claimed, buffer.ledger().trained) == (1, 1)
    assert place.dir.tally.exists()
    settle = lead.prepare_checkpoint(after(2))
    place.join()
    with pytest.raises(FencedOut):
        settle()
    with pytest.raises(FencedOut):
        lead.prepare_checkpoint(after(2))
    assert buffer.ledger().trained == 1


def test_a_learner_killed_before_its_checkpoint_was_settled_leaves_a_whole_tally(place: Place) -> None:
    """The tally says that the step is trained before Redis does; else its loss would not be noticed."""
    first = place.begin()
    first.prepare_checkpoint(START)()
    place.play_and_record(first, step=1)
    first.prepare_checkpoint(after(1))  # is durable, and the learner is killed
    first.close()
    at_first = load_tally(place.dir.tally)
    assert (at_first.durable_step, at_first.lag) == (0, {})
    resumed = place.begin(progress=after(1))
    resumed.close()
    assert resumed.connections.train.ledger().trained == 1
    tally = load_tally(place.dir.tally)
    assert (tally.durable_step, tally.lag) == (1, {"0": 2})


def test_the_tally_of_a_checkpoint_that_never_was_durable_is_not_used(place: Place) -> None:
    first = place.begin()
    place.play_and_record(first, step=1)
    first.prepare_checkpoint(after(1))()
    place.play_and_record(first, step=2)
    first.prepare_checkpoint(after(2))
    first.close()
    assert tally_at(1, place.dir).lag == {"0": 2} and tally_at(2, place.dir).lag == {"0": 4}
    place.dir.next_tally.write_bytes(place.dir.next_tally.read_bytes()[:-1])
    assert tally_at(1, place.dir).lag == {"0": 2}, "the next tally is not needed, so its damage does not matter"
    place.dir.next_tally.unlink()
    lacking = tally_at(2, place.dir)
    assert (lacking.durable_step, lacking.lag) == (2, {"0": 2})
    place.dir.tally.unlink()
    with pytest.raises(ConfigError, match=r"tally\.json is missing, but 2 steps have been made; restore it"):
        tally_at(2, place.dir)


def test_a_learner_whose_folder_was_taken_over_leaves_the_tally_of_its_successor(place: Place, lead: Lead) -> None:
    settle = lead.prepare_checkpoint(after(1))
    place.taken()
    with pytest.raises(FencedOut, match="another learner has taken over"):
        settle()
    assert not place.dir.tally.exists()


def test_no_version_number_is_used_twice_and_skipped_ones_are_no_lag_also_on_an_emptied_server(place: Place) -> None:
    first = place.begin()
    assert first.with_fresh_version(START) == START  # nothing was ever published
    Bulletin(place.client, place.run_id).announce(empty_offer(9))
    fresh = first.with_fresh_version(msgspec.structs.replace(START, step=5, policy_version=5, highest_published=4))
    assert (fresh.step, fresh.policy_version) == (5, 10)
    assert fresh.lags(np.array([3, 5, 9, 10], np.int32)).tolist() == [2, 0, 0, 0]
    first.prepare_checkpoint(START)()
    first.reserve_version(14)  # which actors still serve, and which is younger than the checkpoint
    first.close()
    place.client.flushdb()
    at_ten = msgspec.structs.replace(START, step=10, policy_version=10, highest_published=10)
    resumed = place.begin(progress=at_ten)
    resumed.close()
    fresh = resumed.with_fresh_version(at_ten)
    assert fresh.policy_version == 15
    assert fresh.lags(np.array([10, 14, 15], np.int32)).tolist() == [0, 0, 0]
    place.taken()
    with pytest.raises(FencedOut):
        resumed.reserve_version(15)
    assert load_highest_version(place.dir.highest_version) == 14


def test_adapters_are_not_trained_further_on_other_weights(place: Place) -> None:
    """A resumed learner reads the folder of `model.path` again; nothing else would notice."""
    for _ in range(2):
        lead = place.begin(adapted=Adapted(root="one", scaling=1.0))
        lead.prepare_checkpoint(START)()
        lead.close()
    with pytest.raises(ConfigError, match="their hash is other, it was one; restore the folder"):
        place.begin(adapted=Adapted(root="other", scaling=1.0))
