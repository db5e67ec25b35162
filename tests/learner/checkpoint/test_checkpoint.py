import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.records.version_lag import Resumption
from slipstream.learner.batch.pack import micro_batches, numbered
from slipstream.learner.checkpoint.checkpoint import Progress, latest_checkpoint, load, take_snapshot, write
from slipstream.learner.checkpoint.checkpoint_writer import CheckpointWriter
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.model.optimizer import begin_moments, make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.learner.step.step_metrics import StepMetrics
from tests.full_disk import largest_file
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model
from tests.waiting import wait_until


@dataclass
class Learner:
    model: PackedModel
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    ranks: Ranks

    @property
    def models(self) -> StepModels:
        return StepModels(policy=self.model, optimizer=self.optimizer, schedule=self.schedule)

    def train(self, step: int) -> StepMetrics:
        sequences = numbered([random_sequence(20, seed=10 * step + number)] for number in range(4))
        packs = micro_batches(sequences, max_tokens=50, num_ranks=1, rank=0)
        settings = StepSettings(objective=ObjectiveConfig(surrogate="cispo", correction="none"), max_grad_norm=1.0)
        return train_step(self.models, StepBatch.of(sequences, packs), settings=settings, ranks=self.ranks)

    def writing(self, folder: Path, *, keep: int = 2) -> closing[CheckpointWriter]:
        return closing(CheckpointWriter(folder, ranks=self.ranks, keep=keep))

    def begin(self, writer: CheckpointWriter, step: int, once_durable: Callable[[], None] = lambda: None) -> None:
        writer.begin(self.models, progress=progress_at(step), once_durable=once_durable)

    def write(self, writer: CheckpointWriter, step: int, once_durable: Callable[[], None] = lambda: None) -> None:
        """Begin a checkpoint and wait until it is durable."""
        self.begin(writer, step, once_durable)
        writer.wait()

    def save(self, folder: Path, step: int) -> Path:
        with self.writing(folder) as writer:
            self.write(writer, step)
        return folder / f"step_{step:06d}"

    def load(self, path: Path) -> Progress:
        return load(path, self.models)

    def state(self) -> list[torch.Tensor]:
        """Every weight, with what AdamW keeps of it."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        parts = [part for weight in weights for part in (weight, *self.optimizer.state[weight].values())]
        return [(part.to_local() if isinstance(part, DTensor) else part).detach().clone() for part in parts]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in full_tensors(self.model)}


def progress_at(step: int) -> Progress:
    counts = {"next_group_id": 8 * step, "tokens_trained": 100 * step}
    resumptions = (Resumption(checkpoint_version=1, first_version=step),)
    return Progress(step=step, policy_version=step, highest_published=step, **counts, resumptions=resumptions)


def begun(model: PackedModel, ranks: Ranks, config: OptimConfig) -> Learner:
    optimizer = make_optimizer(model, config=config)
    schedule = make_schedule(optimizer, config=config, num_steps=10)
    return Learner(model=model, optimizer=optimizer, schedule=schedule, ranks=ranks)


def make_learner(folder: Path, ranks: Ranks) -> Learner:
    model = load_model(folder, ranks=ranks, settings=FLOAT32)
    return begun(model, ranks, OptimConfig(lr=1e-3, warmup_steps=2, schedule="cosine"))


Make = Callable[[], Learner]


@pytest.fixture
def make(tiny: Path, ranks: Ranks) -> Make:
    """A learner of the tiny model, as it begins."""
    return partial(make_learner, tiny, ranks)


def test_a_resumed_learner_continues_bit_for_bit(tmp_path: Path, make: Make, device: torch.device) -> None:
    """A GPU may add up gradients in another order: there the state is the same, and what follows within a tolerance."""
    steady = make()
    for step in range(3):
        steady.train(step)
    path, saved = steady.save(tmp_path, 3), steady.state()
    random_after_save = torch.rand(4)
    steady_metrics = [steady.train(3), steady.train(4)]

    resumed = make()
    assert resumed.load(path) == progress_at(3)
    assert torch.equal(torch.rand(4), random_after_save)
    torch.testing.assert_close(resumed.state(), saved, rtol=0, atol=0)
    resumed_metrics = [resumed.train(3), resumed.train(4)]
    if device.type == "cpu":
        assert resumed_metrics == steady_metrics
    torch.testing.assert_close(resumed.weights(), steady.weights(), rtol=0, atol=0 if device.type == "cpu" else 1e-4)


def test_a_checkpoint_before_the_first_step_resumes_too(tmp_path: Path, make: Make) -> None:
    steady, resumed = make(), make()
    resumed.load(steady.save(tmp_path, 0))
    assert resumed.train(0) == steady.train(0)
    torch.testing.assert_close(resumed.weights(), steady.weights(), rtol=0, atol=0)


@pytest.mark.parametrize("steps", [(1, 2, 10), (999_999, 1_000_000, 1_000_001)], ids=["few", "by step, not by letter"])
def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, make: Make, steps: tuple[int, int, int]) -> None:
    learner = make()
    _, older, newest = [learner.save(tmp_path, step) for step in steps]
    assert set(tmp_path.iterdir()) == {older, newest}
    assert latest_checkpoint(tmp_path) == newest


def test_the_optimizers_counters_are_where_its_weights_are() -> None:
    """Fused AdamW looks for them there; a CUDA device is not needed to see where they are put."""
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    begin_moments(optimizer)
    assert {value.device.type for value in optimizer.state[parameter].values()} == {"meta"}


def test_a_half_written_checkpoint_is_never_resumed(tmp_path: Path, make: Make) -> None:
    learner = make()
    assert latest_checkpoint(tmp_path) is None
    whole, half = learner.save(tmp_path, 1), learner.save(tmp_path, 2)
    (half / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path) == whole
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: .*; restore the checkpoint"):
        learner.load(half)
    assert learner.load(learner.save(tmp_path, 2)) == progress_at(2)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_of_a_later_step_replaces_no_newer_one(tmp_path: Path, make: Make, keep: int) -> None:
    learner = make()
    older, damaged = learner.save(tmp_path, 5), learner.save(tmp_path, 10)
    (shard,) = damaged.glob("*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with learner.writing(tmp_path, keep=keep) as writer:
        assert writer.newest(ranks=learner.ranks) == older
        for step in (7, 8):
            learner.write(writer, step)
            assert latest_checkpoint(tmp_path) == tmp_path / f"step_{step:06d}"
    kept = ["step_000008"] if keep == 1 else ["step_000007", "step_000008"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "step_000010.damaged"]
    (tmp_path / "step_000010.damaged" / shard.name).write_bytes(whole)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000008"


def test_another_models_checkpoint_and_a_truncated_one_are_refused(tmp_path: Path, make: Make, ranks: Ranks) -> None:
    learner = make()
    path = learner.save(tmp_path, 1)
    wider = make_learner(save_tiny_model(tmp_path / "wider", intermediate_size=256), ranks)
    with pytest.raises(ValueError, match="must be of the same model"):
        wider.load(path)
    (shard,) = path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="but its manifest says"):
        learner.load(path)


def test_a_full_disk_leaves_the_older_checkpoint_intact_and_is_reported_later(tmp_path: Path, make: Make) -> None:
    learner, covered = make(), []
    older = learner.save(tmp_path, 1)
    with learner.writing(tmp_path) as writer:
        with largest_file(bytes_allowed=50_000):
            learner.begin(writer, 2, lambda: covered.append(2))
            with pytest.raises(ValueError, match="free disk space"):
                wait_until(lambda: bool(writer.raise_failure()), "the failure")
        assert covered == []
        assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
        assert learner.load(older) == progress_at(1)
        learner.write(writer, 2, lambda: covered.append(2))
        assert covered == [2]


@pytest.mark.parametrize("keep", [1, 2])
def test_an_old_checkpoint_that_cannot_be_removed_is_logged_and_the_new_one_stays(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    """As on NFS, where the folder of a file that another program has open cannot be removed."""
    learner, covered, rmtree = make(), [], shutil.rmtree

    def rmtree_except_the_first(path: Path, ignore_errors: bool = False) -> None:
        if path.name == "step_000001":
            raise OSError(39, "Directory not empty", str(path))
        rmtree(path, ignore_errors=ignore_errors)

    with learner.writing(tmp_path, keep=keep) as writer:
        for step in range(1, keep + 1):
            learner.begin(writer, step)
        writer.wait()
        with monkeypatch.context() as open_elsewhere:
            open_elsewhere.setattr(shutil, "rmtree", rmtree_except_the_first)
            learner.write(writer, keep + 1, lambda: covered.append(keep + 1))
        assert latest_checkpoint(tmp_path) == tmp_path / f"step_{keep + 1:06d}"
        assert covered == [keep + 1]
        assert f"cannot remove the old checkpoint {tmp_path / 'step_000001'}" in caplog.text
        learner.write(writer, keep + 2)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{keep + back:06d}" for back in range(3 - keep, 3)}


@pytest.mark.parametrize("stager", [None, StateDictStager()], ids=["on a CPU", "into memory of its own"])
def test_a_change_after_the_copy_is_not_saved(stager: StateDictStager | None, tmp_path: Path, make: Make) -> None:
    learner = make()
    learner.train(0)
    before = learner.weights()
    snapshot = take_snapshot(learner.models, progress=progress_at(1), stager=stager)
    expected = learner.train(1)
    assert not torch.equal(learner.weights()["model.norm.weight"], before["model.norm.weight"])
    assert dist.group.WORLD is not None
    fence = Fence(tmp_path)
    fence.take()
    write(tmp_path, snapshot, group=dist.group.WORLD, keep=2, fence=fence)
    resumed = make()
    assert resumed.load(tmp_path / "step_000001") == progress_at(1)
    torch.testing.assert_close(resumed.weights(), before, rtol=0, atol=0)
    assert resumed.train(1) == expected


def test_a_checkpoint_is_written_during_training_and_the_next_one_waits_for_it(tmp_path: Path, make: Make) -> None:
    learner, told, happened = make(), threading.Event(), []

    def wait_to_be_told() -> None:
        told.wait(60)
        happened.append("the first is durable")

    def begin_the_next() -> None:
        learner.begin(writer, 2)
        happened.append("the next has begun")

    with learner.writing(tmp_path) as writer:
        learner.begin(writer, 1, wait_to_be_told)
        learner.train(1)
        writer.raise_failure()  # no write is in progress, and none has failed
        assert happened == []
        following = threading.Thread(target=begin_the_next)
        following.start()
        following.join(0.5)
        assert happened == []
        told.set()
        following.join(60)
        assert happened == ["the first is durable", "the next has begun"]
        writer.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000002"


def test_once_durable_runs_after_a_checkpoint_and_its_failure_is_raised(tmp_path: Path, make: Make) -> None:
    learner = make()

    def fail() -> None:
        raise LookupError(str(latest_checkpoint(tmp_path)))

    with learner.writing(tmp_path) as writer:
        learner.begin(writer, 1, fail)
        with pytest.raises(LookupError, match="step_000001"):
            learner.begin(writer, 2)
        writer.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"
