"""Groups in which nothing has an advantage: dropped and replaced, or trained like the others."""

from pathlib import Path

import numpy as np
import pytest
import redis

from slipstream.common.config.config import load_config
from slipstream.common.process.shutdown import Shutdown
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.supply.supply import Supply
from slipstream.replay.records.ticket import InsertResult
from tests.learner.credit.test_token_advantages import group_of, two_turns
from tests.learner.supply.test_supply import ahead_of
from tests.replay.records.attempts import attempt_at, earning, make_buffer

KEEPS = "replay.drop_zero_variance=false"
PRESETS = sorted(Path("conf/objective").glob("*.yaml"))


def test_a_step_takes_the_oldest_groups_whatever_they_earned(redis_client: redis.Redis, run_id: str) -> None:
    config = load_config(
        None, [KEEPS, "replay.group_size=2", "replay.groups_per_step=2", "replay.target_lag=1", "learner.steps=9"]
    )
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    supply = Supply(buffer.learner, config, first_group_id=0)
    supply.admit(1, [], published_version=0)
    while (lease := buffer.actor.lease("a")) is not None:
        for member in range(2):
            won = float(lease.ticket.group_id == 1 and member == 0)  # only in group 1 do returns differ
            attempt = earning(attempt_at(lease, member, run_id=run_id), won)
            assert buffer.actor.insert(lease, attempt) is InsertResult.STORED
    batch = supply.next_batch(ahead_of(1), Shutdown())
    assert batch is not None
    assert [group.ticket.group_id for group in batch.groups] == [0, 1]
    assert batch.num_dropped == {}
    ledger = buffer.learner.ledger()
    assert (ledger.opened, ledger.dropped, ledger.balanced) == (
        4,
        {},
        True,
    )  # a step ahead; no more is expected to drop


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_group_that_teaches_nothing_has_no_advantage_beside_others(preset: Path) -> None:
    """Every preset accepts the option; those that compare no siblings train such groups whatever it says."""
    replay = ["replay.num_trees=2"] if preset.stem == "tree" else []
    objective = load_config(None, [KEEPS, *replay], presets=[str(preset)]).objective
    equal = group_of(two_turns(0.0, 0.3), two_turns(0.0, 0.1 + 0.2))
    other = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))
    assert teaches(equal, objective=objective) != objective.compares_siblings
    if not objective.compares_siblings:
        return
    alone = sequences_with_advantages([other], objective=objective)
    beside = sequences_with_advantages([equal, other], objective=objective)
    for sequence in beside[:2]:
        np.testing.assert_allclose(sequence.advantages, 0.0, atol=1e-6)
    for sequence, same in zip(beside[2:], alone, strict=True):
        np.testing.assert_allclose(sequence.advantages, same.advantages, atol=1e-6)


def test_dapo_drops_such_groups_whatever_the_file_before_it_says() -> None:
    assert not load_config("conf/quickstart.yaml", []).replay.drop_zero_variance
    assert load_config("conf/quickstart.yaml", [], presets=["conf/objective/dapo.yaml"]).replay.drop_zero_variance
