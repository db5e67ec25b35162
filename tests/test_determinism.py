"""The same seed gives the same training, where only one actor plays and no policy is ever old."""

from pathlib import Path

from replay.server import Server
from tests.processes import GUESS, Run

SYNCHRONOUS = ["replay.target_lag=0", "replay.max_lag=0", "learner.steps=6", "learner.checkpoint_every=100",
               "replay.lease_ttl_s=120"]  # fmt: skip


def test_the_same_seed_and_one_actor_without_lag_train_alike_twice(
    redis_server: Server, run_id: str, tmp_path: Path
) -> None:
    """Two runs side by side, so that each disturbs the other's timing."""
    with (
        Run(f"{run_id}-1", root=tmp_path, server=redis_server, settings=[*GUESS, *SYNCHRONOUS]) as first,
        Run(f"{run_id}-2", root=tmp_path, server=redis_server, settings=[*GUESS, *SYNCHRONOUS]) as second,
    ):
        ends = [run.start_learner() for run in (first, second)] + [run.start_actor("actor") for run in (first, second)]
        assert [process.wait() for process in ends] == [0, 0, 0, 0]
        for a, b in zip(first.step_records(), second.step_records(), strict=True):
            print(
                [
                    (n, a[n], b[n])
                    for n in ("reward/mean", "optim/loss", "optim/grad_norm", "optim/entropy", "mismatch/kl")
                ]
            )
        assert [r["reward/mean"] for r in first.step_records()] == [r["reward/mean"] for r in second.step_records()]
        assert [r["optim/loss"] for r in first.step_records()] == [r["optim/loss"] for r in second.step_records()]
