"""A learner that is run again from a run's archive comes to the run's weights, to the last bit."""

import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from slipstream.actors.host.act import EXIT_RUN_FAILED
from slipstream.common.config.config import load_config
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.learner import rerun_check
from slipstream.learner.checkpoint.checkpoint import latest_checkpoint
from slipstream.replay.run.archive import Archive
from slipstream.replay.server.redis_server import Server
from tests.learner.checkpoint.test_checkpoint_kill import weights
from tests.processes import GUESS, Process, Run, nothing_runs

NUM_STEPS = 8
GROUPS_PER_STEP = 4
SETTINGS = [*GUESS, "replay.max_lag=2", "env.options={step_s: 0.05}", f"learner.steps={NUM_STEPS}"]
SETTINGS += ["optim.schedule=cosine", "optim.warmup_steps=2", "warm_start.episodes=6", "warm_start.batch_tokens=64"]


@pytest.mark.parametrize("in_full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.timeout(1200)
def test_a_run_whose_learner_was_killed_is_trained_again_to_the_same_bits(
    redis_server: Server, run_id: str, tmp_path: Path, in_full: bool
) -> None:
    """The learner dies between two checkpoints: what it archived since is cut, and others' work is in its place.

    Nothing is lost by it, and nothing counted twice.
    """
    settings = [*SETTINGS, "learner.checkpoint_every=3"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        first, actor = run.start_learner(), run.start_actor("actor")
        run.wait_until(lambda: is_frozen_between_checkpoints(run, first), "the learner is past its first checkpoint")
        saved_step, killed_at = checkpointed_step(run), run.last_step()
        assert 0 < saved_step < killed_at < NUM_STEPS
        assert archive_of(run).last_step >= killed_at  # what its successor has to cut
        undone, published_before = run.claimed_after(saved_step), run.published_version()
        assert len(undone) >= GROUPS_PER_STEP * (killed_at - saved_step)
        assert run.ledger().trained <= GROUPS_PER_STEP * saved_step
        first.kill()
        assert [process.wait() for process in (run.start_learner(), actor)] == [0, 0]
        books = run.ledger()
        assert books.trained == GROUPS_PER_STEP * NUM_STEPS
        assert books.opened == books.trained + sum(books.dropped.values())
        assert set(books.dropped) <= {"zero_variance", "too_old"}
        assert books.balanced and run.audit() == []
        assert run.steps() == list(range(1, NUM_STEPS + 1))
        # One version per step, and one for the weights of the checkpoint under a new number.
        assert run.published_version() >= published_before + 1 + NUM_STEPS - saved_step
        run.wait_until(lambda: nothing_runs(run_id), "every process is gone", deadline_s=30)
        writers = {path.name.partition(".")[2] for path in run.dir.trajectories.iterdir()}
        assert len(writers) == 2, "each learner has its own epoch"
        assert archive_of(run).last_step == len(list(run.dir.trajectories.iterdir())) == NUM_STEPS
        assert versions_left_out(run) > 0, "the second learner reused the version numbers of the first one"

        again = run.start_rerun("again")
        assert again.wait() == 0, again.last_words()
        assert f"identical to {run.dir.trained_model}" in again.said()
        assert weights(tmp_path, "again") == weights(tmp_path, run_id)
        assert curves(tmp_path, "again") == curves(tmp_path, run_id)

        other_settings_give_another_model_and_say_so(run)
        if in_full:
            a_rerun_that_was_told_to_stop_goes_on_to_the_same_bits(run)
            what_cannot_be_trained_again_is_refused(run)
        assert run.ledger() == books  # the re-runs had no part in it


def a_rerun_that_was_told_to_stop_goes_on_to_the_same_bits(run: Run) -> None:
    root = run.dir.path.parent
    stopped = run.start_rerun("stopped", "learner.checkpoint_every=1")  # which slows it down
    run.wait_until(lambda: was_asked_to_stop_in_mid_run(root, stopped), "the request to stop in mid-run")
    assert stopped.wait() == EXIT_PREEMPTED
    made = len(list(read_metrics(RunDir(root, "stopped").metrics)))
    assert 0 < made < NUM_STEPS and not RunDir(root, "stopped").trained_model.exists()
    assert standing(RunDir(root, "stopped")) is Standing.STOPPED
    resumed = run.start_rerun("stopped")
    assert resumed.wait() == 0, resumed.last_words()
    assert "resumed from step_" in resumed.said() and "identical to" in resumed.said()
    assert standing(RunDir(root, "stopped")) is Standing.FINISHED
    assert weights(root, "stopped") == weights(root, run.name)
    assert len(list(read_metrics(RunDir(root, "stopped").metrics))) == NUM_STEPS


def was_asked_to_stop_in_mid_run(root: Path, process: Process) -> bool:
    """Suspend it to look; ask it to stop and resume it once it has made a step and has some left."""
    process.send(signal.SIGSTOP)
    in_mid_run = 0 < len(list(read_metrics(RunDir(root, process.name).metrics))) < NUM_STEPS - 2
    if in_mid_run:
        process.send(signal.SIGTERM)
    process.send(signal.SIGCONT)
    return in_mid_run


def other_settings_give_another_model_and_say_so(run: Run) -> None:
    other = run.start_rerun("other", "optim.lr=2e-3")
    assert other.wait() == 0, other.last_words()
    said = other.said()
    assert "not identical to" in said and "optim.lr was 0.001 and is 0.002" in said
    assert f"steps 1 to {NUM_STEPS}: optim.lr was 0.001" in said
    assert weights(run.dir.path.parent, "other") != weights(run.dir.path.parent, run.name)
    shorter = run.start_rerun("shorter", "learner.steps=4", "optim.schedule=constant")
    assert shorter.wait() == 0 and "contains no trained model of step 4" in shorter.said()


def test_other_weights_are_no_failure_if_the_run_went_on_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up --resume RUN learner.steps=4` of a run of eight steps: its first steps had the rates of eight."""
    monkeypatch.setattr(rerun_check, "_trained_step", lambda _: 4)
    config, runs = (
        load_config("conf/quickstart.yaml", ["learner.steps=4"]),
        [RunDir(tmp_path, "run"), RunDir(tmp_path, "again")],
    )
    for seed, run_dir in enumerate(runs):
        run_dir.trained_model.mkdir(parents=True)
        save_file({"weight": torch.full((2,), float(seed))}, run_dir.trained_model / "model.safetensors")
    compare = partial(rerun_check.check_rerun, config, runs[1], original_config=config, original=runs[0])
    found = f"not identical to {runs[0].trained_model}: 1 of 1 tensors differ, first weight, by up to 1"
    why = "steps 1 to 2: learner.steps was 8 and is 4"
    assert compare(archived=[why]) == rerun_check.RerunCheck(text=f"{found}; {why}", exit_code=0)
    assert compare(archived=[]) == rerun_check.RerunCheck(text=found, exit_code=1)


def what_cannot_be_trained_again_is_refused(run: Run) -> None:
    assert "`run.rerun_of` must be another run than run.name" in refusal(run, run.name)
    live = RunDir(run.dir.path.parent, "live")
    live.create()
    live.config.write_text("run: {name: live}\n")
    assert "run 'live' exists in" in refusal(run, "live")
    assert "run 'again' has no archive in" in refusal(run, "of-again", "run.rerun_of=again")
    step_4 = next(run.dir.trajectories.glob("step_000004.*"))
    whole = step_4.read_bytes()
    step_4.write_bytes(whole[:-9])
    assert f"{step_4} cannot be trained on" in refusal(run, "torn")
    step_4.unlink()
    assert "has no step 4; set learner.steps=3 to train only the steps before it again" in refusal(run, "gap")
    assert not RunDir(run.dir.path.parent, "gap").metrics.exists()  # it says so before it trains


def refusal(run: Run, name: str, *settings: str) -> str:
    """The last line of a re-run that ends with bad input."""
    refused = run.start_rerun(name, *settings)
    assert refused.wait() == 2, refused.last_words()
    return refused.said().splitlines()[-1].removeprefix("slipstream learner: ")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_of_two_ranks_trains_again_to_the_same_bits(redis_server: Server, run_id: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "learner.ranks=2", "learner.steps=4"]
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        it_stops_before_a_step_that_it_cannot_archive(run)
        assert [process.wait() for process in (run.start_learner(), run.start_actor("actor"))] == [0, 0]
        assert run.ledger().trained == 4 * archive_of(run).last_step == 16
        again = run.start_rerun("again")
        assert again.wait() == 0, again.last_words()
        assert f"identical to {run.dir.trained_model}" in again.said()
        assert weights(tmp_path, "again") == weights(tmp_path, run_id)
        alone = run.start_rerun("alone", "learner.ranks=1")
        assert alone.wait() == 0 and "steps 1 to 4: learner.ranks was 2 and is 1" in alone.said()


def it_stops_before_a_step_that_it_cannot_archive(run: Run) -> None:
    """Where the folder should be there is a file, which fails as a full disk does."""
    run.dir.path.mkdir()
    run.dir.trajectories.touch()
    learner, actor = run.start_learner(), run.start_actor("first actor")
    assert learner.wait() == 1, learner.last_words()
    assert "to the archive:" in learner.said() and "free some space or repair the disk" in learner.said()
    assert actor.wait() == EXIT_RUN_FAILED
    assert run.last_step() == 0 and run.ledger().trained == 0 and run.ledger().claimed > 0
    run.dir.trajectories.unlink()


def checkpointed_step(run: Run) -> int:
    """Of the newest whole checkpoint."""
    newest = latest_checkpoint(run.dir.checkpoints)
    return int(newest.name.removeprefix("step_")) if newest else 0


def is_frozen_between_checkpoints(run: Run, learner: Process) -> bool:
    """Stop the learner to look; it stays stopped if it is past its first checkpoint and has made a step since."""
    learner.send(signal.SIGSTOP)
    if 0 < checkpointed_step(run) < run.last_step():
        return True
    learner.send(signal.SIGCONT)
    return False


def archive_of(run: Run) -> Archive:
    return Archive(run.dir.trajectories, run.name)


def versions_left_out(run: Run) -> int:
    """How many policy versions were jumped over between two steps of the archive."""
    vocab_size = int(yaml.safe_load((run.dir.model / "config.json").read_text())["vocab_size"])
    versions = [
        archive_of(run).read(step, vocab_size=vocab_size, max_group_bytes=1 << 20).policy_version
        for step in range(1, NUM_STEPS + 1)
    ]
    return versions[-1] - versions[0] - (NUM_STEPS - 1)


def curves(root: Path, name: str) -> list[tuple[float, ...]]:
    """What every step measured of its data and of the policy."""
    names = ["step", "trained/reward", "replay/consumed_tokens", "lag/mean", "lag/max"]
    names += ["optim/loss", "optim/lr", "mismatch/kl", "optim/masked_fraction"]
    records = list(read_metrics(RunDir(root, name).metrics))
    return [tuple(record[name] for name in names) for record in records if "trained/reward" in record]
