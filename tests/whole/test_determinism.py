"""The same seed gives the same training, where one actor plays and no policy is ever old."""

from pathlib import Path

import pytest

from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, Run

NUM_STEPS = 6
SYNCHRONOUS = [
    "replay.target_lag=0",
    "replay.max_lag=0",
    f"learner.steps={NUM_STEPS}",
    "replay.lease_ttl_s=300",  # an attempt that is made again has another seed
]


@pytest.mark.long  # the loop to read is a second run of the same seed
@pytest.mark.timeout(1200)
def test_the_same_seed_and_one_actor_without_lag_train_alike_twice(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """Two runs side by side, so that each disturbs the other's timing.

    A generation's seed follows from the run's seed, the group, the member, the attempt and the turn; a step takes its
    groups in the order of their ids; and on a CPU vLLM gives a request the same bits whatever it is batched with. So
    the curves are equal to the last bit.
    """
    with (
        Run(f"{run_id}-1", root=tmp_path, server=redis_server, settings=[*GUESS, *SYNCHRONOUS]) as first,
        Run(f"{run_id}-2", root=tmp_path, server=redis_server, settings=[*GUESS, *SYNCHRONOUS]) as second,
    ):
        processes = [run.start_learner() for run in (first, second)]
        processes += [run.start_actor("actor") for run in (first, second)]
        assert [process.wait() for process in processes] == [0, 0, 0, 0]
        assert len(first.steps()) == NUM_STEPS
        assert series(second, "trained/reward") == series(first, "trained/reward")
        assert series(second, "replay/consumed_tokens") == series(first, "replay/consumed_tokens")
        assert series(second, "optim/loss") == series(first, "optim/loss")
        assert series(second, "mismatch/kl") == series(first, "mismatch/kl")


def series(run: Run, name: str) -> list[float]:
    return [record[name] for record in run.step_records()]
