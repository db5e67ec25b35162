"""The study of durations: virtual actors say truly what sampled each token, and what the two rules do with that."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.connection import connect
from slipstream.replay.server.server import start_server
from slipstream.tools.lab.fleets.durations import Cell, OldRule, measure
from slipstream.tools.lab.fleets.durations_page import NEW_RULE, OLD_RULE, PATIENT, QUICK, Study, write
from slipstream.tools.lab.fleets.virtual_actors import TOKENS_PER_UNIT, Durations, VirtualActors
from slipstream.tools.lab.study.page import BEGIN, END
from tests.replay.records.attempts import Views, ticket

CELL = Cell(rule=NEW_RULE, max_lag=4, target_lag=2, long=8.0, step_units=0.2, num_steps=6, seed=0)
EVEN = Durations(long=8.0, long_share=0.3, seed=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A client of a server of its own, as the study empties the server."""
    with start_server(tmp_path_factory.mktemp("redis")) as server, connect(server.admin_url) as client:
        client.config_set("appendonly", "no")
        yield client


def actors_of(client: redis.Redis, *, num_groups: int, num_slots: int) -> tuple[Views, VirtualActors]:
    client.flushdb()
    buffer = Views(client, "virtual", ReplayConfig(lease_ttl_s=3600, max_attempts=1), vocab_size=2)
    buffer.learner.acquire_epoch()
    buffer.learner.open([ticket(group_id) for group_id in range(num_groups)])
    return buffer, VirtualActors(buffer.actor, "virtual", EVEN, num_actors=1, num_slots=num_slots)


def test_each_token_is_of_the_version_that_was_published_when_it_came(client: redis.Redis) -> None:
    _, actors = actors_of(client, num_groups=1, num_slots=2)
    for version, time in ((1, 0.25), (2, 0.5)):
        actors.play_until(time)
        actors.publish(version)
    actors.play_on()
    for trajectory in actors.finished[0]:
        spans = {span.policy_version: span.stop - span.start for span in trajectory.version_spans}
        assert list(spans) == [0, 1, 2] and spans[0] == pytest.approx(spans[1], abs=1)
        assert spans[0] == pytest.approx(0.25 * TOKENS_PER_UNIT, abs=1)
        assert sum(spans.values()) == trajectory.num_tokens - 1


def test_no_more_episodes_are_played_than_there_are_slots(client: redis.Redis) -> None:
    """Two groups of two, all short, in one slot: one episode after the other."""
    buffer, actors = actors_of(client, num_groups=2, num_slots=1)
    while buffer.learner.ledger().ready < 2:
        actors.play_on()
    episodes = [trajectory for group in actors.finished.values() for trajectory in group]
    assert actors.now == pytest.approx(sum(trajectory.duration_s for trajectory in episodes))


def test_the_old_rule_drops_by_the_oldest_token_and_only_what_is_ready(client: redis.Redis) -> None:
    buffer, actors = actors_of(client, num_groups=2, num_slots=2)
    actors.play_on()
    assert len(actors.finished) == 1
    old_rule = OldRule(buffer.learner, actors, max_lag=4)
    old_rule.sweep(4)
    assert buffer.learner.ledger().dropped == {}
    old_rule.sweep(5)
    assert (
        buffer.learner.ledger().dropped == {"too_old": 1}
        and buffer.learner.ledger().leased + buffer.learner.ledger().queued == 1
    )


def test_a_cell_comes_out_the_same_again(client: redis.Redis) -> None:
    cell = dataclasses.replace(CELL, long=4.0)
    assert measure(cell, client) == measure(cell, client)


def test_by_groups_long_tasks_are_dropped_and_by_tokens_they_are_trained(client: redis.Redis) -> None:
    old, new = (measure(dataclasses.replace(CELL, rule=rule), client) for rule in (OLD_RULE, NEW_RULE))
    assert old.dropped_long > 0.3 and old.trained_long < old.opened_long - 0.05 and old.masked == 0
    assert new.dropped_long == 0 and new.wasted == new.masked < old.wasted
    assert new.masked_long > 0 and sum(new.lag.values()) == pytest.approx(1, abs=1e-3)


def test_the_page_has_a_row_for_each_cell_and_keeps_what_is_written_around_its_tables(
    client: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "durations.md").write_text(f"before\n{BEGIN}{END}\nafter\n")
    cells = [dataclasses.replace(CELL, long=2.0, num_steps=1, step_units=step_units) for step_units in (QUICK, PATIENT)]
    study = Study(command="study", date="today", results=[measure(cell, client) for cell in cells])
    write(study, tmp_path)
    assert json.loads((tmp_path / "durations.json").read_text())["results"][0]["long"] == 2.0
    page = (tmp_path / "durations.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n")
    assert page.count("\n| 2 | 2 x |") == 1 and page.count("long tasks take 2 x") == 1
