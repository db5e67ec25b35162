"""Evaluations during training, against a real buffer; the test does the actors' work."""

from collections.abc import Callable

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub import catalogue
from slipstream.envhub.catalogue import ADAPTERS, ASSETS, DRIVING, ENVS, HELD_OUT_BY_OPTION, REMOTE, num_held_out
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.evaluation import Evaluation, RegularEvaluation
from slipstream.replay.records.ticket import InsertResult
from slipstream.tools.run.check_input import check_held_out
from tests.learner.supply.test_supply import ahead_of
from tests.replay.records.attempts import Views, leased, make_buffer

NUM_TASKS = 3


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    buffer = make_buffer(redis_client, run_id, stream="eval")
    buffer.learner.acquire_epoch()
    return buffer


def config(*overrides: str) -> Config:
    return load_config(None, [f"eval.num_tasks={NUM_TASKS}", "eval.every=4", "learner.steps=20", *overrides])


def at(step: int, *, version: int | None = None, published: int | None = None) -> Progress:
    """Two versions more than steps, as after a warm start, and each is published."""
    begun = ahead_of(step + 1, step + 2 if version is None else version)
    return begun if published is None else msgspec.structs.replace(begun, highest_published=published)


def play(
    buffer: Views, *, version: int, number: int = 2 * NUM_TASKS, succeeds: Callable[[int], bool] = lambda place: True
) -> None:
    """Do what actors at `version` do with the next `number` tickets."""
    for _ in range(number):
        lease = leased(buffer)
        attempt = buffer.attempt(lease, 0, policy_version=version)
        attempt = msgspec.structs.replace(attempt, success=succeeds(lease.ticket.group_id))
        assert buffer.actor.insert(lease, attempt) is InsertResult.STORED


def test_one_begins_when_it_is_due_and_its_result_is_of_the_step_that_it_began_at(buffer: Views) -> None:
    regular = RegularEvaluation(buffer.learner, config(), last_step=0)
    assert regular.advance(at(3)) is None and buffer.ledger.opened == 0
    assert regular.advance(at(4)) is None and buffer.ledger.queued == 6
    play(buffer, version=6, number=4, succeeds=lambda place: place in (0, 3))
    assert regular.advance(at(5)) is None
    play(buffer, version=6, number=2, succeeds=lambda place: False)
    finished = regular.advance(at(9))
    assert finished is not None and (finished.step, finished.policy_version, finished.num_mixed) == (4, 6, 0)
    result = finished.result()
    assert (result.sampled, result.greedy, result.num_tasks) == (pytest.approx(1 / 3), pytest.approx(1 / 3), 3)
    # The next was due at step 8, while this one was under way; now it begins.
    assert leased(buffer).ticket.min_policy_version == 11
    assert (buffer.ledger.trained, buffer.ledger.opened) == (6, 12)
    assert buffer.audit() == []


def test_an_evaluation_without_players_moves_to_the_version_that_is_published_next(buffer: Views) -> None:
    regular = RegularEvaluation(buffer.learner, config(), last_step=0)
    regular.advance(at(4))
    regular.advance(at(5, published=6))  # its version is not published
    assert buffer.ledger.opened == 6
    regular.advance(at(6))
    assert (buffer.ledger.queued, buffer.ledger.dropped) == (6, {"superseded": 6})
    play(buffer, version=8)
    finished = regular.advance(at(7))
    assert finished is not None and (finished.step, finished.policy_version) == (6, 8)


def test_a_started_evaluation_stays_at_its_version(buffer: Views) -> None:
    regular = RegularEvaluation(buffer.learner, config(), last_step=0)
    regular.advance(at(4))
    lease = buffer.actor.lease("a")
    for step in range(5, 13):
        assert regular.advance(at(step)) is None
    assert lease is not None and buffer.ledger.leased == 1 and buffer.ledger.opened == 6


def test_an_abandoned_evaluation_is_dropped_and_another_begins(buffer: Views, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("slipstream.learner.lead.evaluation.time.monotonic", lambda: now)
    regular = RegularEvaluation(buffer.learner, config("replay.lease_ttl_s=10"), last_step=0)
    regular.advance(at(4))
    play(buffer, version=6, number=1)
    regular.advance(at(5))
    regular.advance(at(6))  # from here on no actor is seen to play it
    now += 9.0
    regular.advance(at(7))
    assert buffer.ledger.opened == 6
    now += 2.0
    assert regular.advance(at(8)) is None
    assert (buffer.ledger.dropped, buffer.ledger.queued) == ({"superseded": 5}, 6)
    assert leased(buffer).ticket.min_policy_version == 10
    assert buffer.audit() == []


def test_an_episode_of_two_versions_does_not_count(buffer: Views) -> None:
    evaluation = Evaluation(buffer.learner, config(), at(4))
    play(buffer, version=6, number=5)
    play(buffer, version=7, number=1, succeeds=lambda place: False)
    assert evaluation.collect() is False
    result = evaluation.result()
    assert result is not None and (result.greedy, result.num_tasks) == (1.0, 2)
    assert evaluation.num_mixed == 1


def test_what_a_learner_that_died_left_open_is_dropped_and_never_counted(buffer: Views) -> None:
    Evaluation(buffer.learner, config(), at(4))
    play(buffer, version=6, number=2)
    buffer.actor.lease("a")
    evaluation = Evaluation(buffer.learner, config(), at(4, version=30))
    assert (buffer.ledger.dropped, buffer.ledger.queued) == ({"superseded": 6}, 6)
    play(buffer, version=30, succeeds=lambda place: False)
    while evaluation.collect():
        pass
    result = evaluation.result()
    assert result is not None and (result.sampled, result.greedy) == (0.0, 0.0)
    assert buffer.audit() == []


def test_a_run_is_evaluated_during_training_by_default_unless_it_has_no_held_out_tasks() -> None:
    def tasks_of(*settings: str) -> int:
        return num_held_out(load_config(None, list(settings)))

    assert load_config(None, []).eval.every == 50
    assert tasks_of() == 32
    assert tasks_of("eval.num_tasks=0") == 0 and tasks_of("eval.num_tasks=7") == 7
    assert tasks_of("env.name=bird", "env.options={train: a.json, databases: b}") == 0
    assert tasks_of("env.name=bird", "env.options={train: a.json, held_out: c.json, databases: b}") == 32
    assert tasks_of("env.mixture={shop: {}, gaia: {options: {train: a}}}") == 0
    remote = "env.options={url: 'http://a', env: gaia, options: {train: a}}"
    assert tasks_of("env.name=remote", remote) == 0
    assert tasks_of("env.name=remote", "env.options={url: 'http://a', env: shop}") == 32


def test_every_environment_whose_options_name_its_held_out_tasks_is_listed() -> None:
    """Those that split their own tasks, or use the train tasks, have held-out tasks without the option."""
    splits_its_own = {"agent", "browsergym", "dataset", "verifiers"}
    names = ENVS | ADAPTERS | ASSETS | REMOTE | DRIVING
    with_option = {name for name in names if "held_out" in catalogue._signature(catalogue._maker(name)).parameters}
    assert with_option - splits_its_own == set(HELD_OUT_BY_OPTION)


def test_held_out_tasks_that_no_option_names_are_refused_before_the_start() -> None:
    asked = load_config(None, ["env.name=bird", "env.options={train: a, databases: b}", "eval.num_tasks=5"])
    with pytest.raises(ConfigError, match=r"`eval.num_tasks` is 5, but `env.options` of bird names no held-out tasks"):
        check_held_out(asked)


@pytest.mark.parametrize(
    ("settings", "last_step", "step", "num_opened"),
    [
        ((), 0, 20, 0),  # the last step has an evaluation of its own
        (("eval.every=0",), 0, 8, 0),
        (("eval.num_tasks=0",), 0, 8, 0),
        ((), 4, 7, 0),
        ((), 4, 9, 6),  # a resumed learner makes up for the one that was not finished
    ],
)
def test_when_one_begins(buffer: Views, settings: tuple[str, ...], last_step: int, step: int, num_opened: int) -> None:
    RegularEvaluation(buffer.learner, config(*settings), last_step=last_step).advance(at(step))
    assert buffer.ledger.opened == num_opened
