"""A run whose tasks are solved is finished: it ends with code 0 and a model, long before `learner.steps`."""

from pathlib import Path

import pytest

from slipstream.common.process.run_state import Standing, standing
from slipstream.replay.fleet.fleet import RunState
from slipstream.replay.server.redis_server import Server
from tests.processes import GUESS, PLAYED_BY_OTHERS, Run

SOLVED = [*GUESS, *PLAYED_BY_OTHERS, "env.name=tests.whole.solved:SolvedEnv"]
SOLVED += ["learner.steps=100000", "learner.checkpoint_every=1000", "replay.groups_per_step=1", "replay.group_size=2"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "num_steps"),
    [
        pytest.param(  # a hundred steps without a gradient
            ["replay.drop_zero_variance=false", "learner.publish_every=3"], 100, id="steps that change nothing"
        ),
        pytest.param(  # no group teaches anything
            ["replay.drop_zero_variance=true", "learner.claim_timeout_s=15"], 0, marks=pytest.mark.long, id="no batch"
        ),
    ],
)
def test_a_solved_run_ends_with_a_model(
    redis_server: Server, run_id: str, tmp_path: Path, settings: list[str], num_steps: int
) -> None:
    with Run(run_id, root=tmp_path, server=redis_server, settings=[*SOLVED, *settings]) as run:
        learner = run.start_learner()
        actor = run.start_scripted_actor("actor")
        assert learner.wait() == 0, learner.last_words()
        assert "the tasks are solved: stop here, or use harder tasks; the run ends as finished" in learner.last_words()
        assert actor.wait() == 0
        assert run.fleet.run_state() is RunState.FINISHED and standing(run.dir) is Standing.FINISHED
        assert run.last_step() == num_steps and (run.dir.trained_model / "model.safetensors").is_file()
        assert run.dir.summary.is_file() and run.audit() == []
