"""Checkpoints: all state that the learner needs to continue as if it had never stopped.

    checkpoints/step_000020/shard-*.safetensors    model, optimizer and random state; each rank writes its own shards
    checkpoints/step_000020/manifest.json          written last: a folder without it was left by a crash

The manifest contains a hash of every file and of itself, so damage is detected when a checkpoint is read. Shards are
safetensors files, so reading one cannot run code. A checkpoint of 2 ranks loads on 1 rank, and the other way round.
`slipstream.learner.checkpoint.checkpoint_writer` writes checkpoints in the background.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.optim.lr_scheduler import LambdaLR

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import sync_path
from slipstream.common.records.version_lag import Resumption, VersionArray, lags
from slipstream.common.transfer.model_folder import blob_of
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.checkpoint.sealed_file import check_file, read_sealed, write_sealed
from slipstream.learner.checkpoint.shard_writer import ShardWriter
from slipstream.learner.model.critic import critic_shards
from slipstream.learner.model.optimizer import begin_moments
from slipstream.learner.model.reward_model import RewardModel, set_score
from slipstream.learner.model.weight_shards import named_shards
from slipstream.learner.objective.return_scale import ReturnScale, scale_of
from slipstream.learner.ranks.ranks import Ranks, refuse_together, share
from slipstream.learner.step.step import StepModels
from slipstream.replay.records.keys import FencedOut

MANIFEST = "manifest.json"
_RNG = "rng"
_CRITIC_STEP, _CRITIC_SCALE = "critic_schedule_step", "critic_scale"
_SCHEMA = 2
_NAME = re.compile(r"step_\d{6,}")

log = logging.getLogger(__name__)


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the learner besides its weights."""

    step: int  # optimizer steps made
    policy_version: int  # of the weights in this checkpoint
    highest_published: int  # version; a resumed learner uses only higher ones
    next_group_id: int
    tokens_trained: int
    resumptions: tuple[Resumption, ...] = ()  # of this run so far, oldest first

    def lags(self, versions: VersionArray) -> VersionArray:
        """How many optimizer steps the learner has made since each of `versions`."""
        return lags(versions, policy_version=self.policy_version, resumptions=self.resumptions)

    def resumed_as(self, first_version: int) -> "Progress":
        """The same weights under the version number that a resumed learner gives them."""
        if first_version == self.policy_version:
            return self
        resumption = Resumption(checkpoint_version=self.policy_version, first_version=first_version)
        return msgspec.structs.replace(self, policy_version=first_version, resumptions=(*self.resumptions, resumption))


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_bytes: int
    xxh3: str  # 128 bits in hex


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    progress: Progress
    schedule_step: int
    files: list[_File]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A copy of everything that a checkpoint contains; training does not change it."""

    state: dict[str, Tensor]
    schedule_step: int
    progress: Progress


def take_snapshot(models: StepModels, *, progress: Progress, stager: StateDictStager | None = None) -> Snapshot:
    """Copy this rank's shards to host memory; with `stager` into its own, which the next copy uses again."""
    state = _state(models)
    if stager is None:
        state = {name: shard.detach().clone() for name, shard in state.items()}
    else:
        # Not PyTorch's DefaultStager around it: that of version 2.11 can stage only once.
        staged = stager.stage(state, non_blocking=stager.pin_memory)
        assert isinstance(staged, dict)
        state = staged
        if stager.pin_memory:
            torch.cuda.synchronize()
    return Snapshot(state=state, schedule_step=models.schedule.last_epoch, progress=progress)


def write(folder: Path, snapshot: Snapshot, *, group: dist.ProcessGroup, keep: int, fence: Fence) -> None:
    """Write `folder/step_NNNNNN`, then remove all but the newest `keep` checkpoints.

    Every rank of `group`, a gloo group, calls it, on one file system. The checkpoint is durable when this returns: its
    shards and then its manifest are synced to disk. If it cannot be written, every rank raises ValueError with the
    reason, and the older checkpoints stay. An old one that cannot be removed is logged, and the next write tries again.
    If another process has taken `fence`, that of `folder`, rank 0 raises FencedOut, and no checkpoint is finished.
    """
    path, rank = folder / f"step_{snapshot.progress.step:06d}", dist.get_rank(group)
    try:
        _on_first_rank(partial(_begin, path, fence), group)
        state_dict_saver.save(snapshot.state, storage_writer=ShardWriter(path), process_group=group)
        _on_first_rank(partial(_finish, path, snapshot, fence), group)
    except (OSError, CheckpointException) as error:
        if rank == 0:
            with fence.held():
                if not _was_finished(path):
                    shutil.rmtree(path, ignore_errors=True)
        raise ValueError(
            f"cannot write the checkpoint {path}: {error}; free disk space or repair the disk (older checkpoints are "
            "intact)"
        ) from error
    if rank == 0:
        with fence.held():
            _keep_newest(folder, keep)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose every byte matches its hash; None if none was ever finished. Reads all of it.

    Damaged checkpoints are logged and skipped. Raises ConfigError if all of them are damaged.
    """
    for path in sorted(folder.glob("*")):
        if not _is_checkpoint(path):
            log.warning("%s is not a checkpoint (a folder with a name like step_000020); ignoring it", path)
    damaged = []
    for path in reversed(finished_checkpoints(folder)):
        try:
            for file in _read_manifest(path).files:
                check_file(path / file.name, file.xxh3)
            return path
        except ConfigError as error:
            log.error("skipping a damaged checkpoint, trying an older one: %s", error)
            damaged.append(str(error))
    if damaged:
        raise ConfigError(
            f"no checkpoint in {folder} is intact: {damaged[0]}; if there is no copy, train again from the archive in "
            "a new run with `slipstream learner --replay-archive`"
        )
    return None


def finished_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints whose manifest was written, oldest first."""
    return sorted((path for path in folder.glob("*") if _is_checkpoint(path) and _was_finished(path)), key=step_of)


def agreed_checkpoint(folder: Path, *, ranks: Ranks) -> Path | None:
    """The `latest_checkpoint` of rank 0, on every rank. Every rank calls it, and raises ConfigError if rank 0 does."""
    newest, problem = None, ""
    try:
        newest = latest_checkpoint(folder) if ranks.rank == 0 else None
    except ConfigError as error:
        problem = str(error)
    refuse_together(problem, ranks=ranks)
    name = share(newest.name if newest else "", str, ranks=ranks)
    return folder / name if name else None


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def load(path: Path, models: StepModels) -> Progress:
    """Restore `models`, with optimizers and schedules, and the random state from a checkpoint. Every rank calls it.

    Raises ConfigError for a checkpoint that is damaged or of another model. The models cannot be used afterwards: some
    tensors may have been read already.
    """
    manifest, critic = _read_manifest(path), models.critic
    state = _state(models)
    _read(path, state)
    torch.set_rng_state(state[_RNG])
    _set_schedule(models.schedule, models.optimizer, manifest.schedule_step)
    if critic is not None:
        _set_schedule(critic.schedule, critic.optimizer, int(state[_CRITIC_STEP]))
        critic.scale = scale_of(state[_CRITIC_SCALE])
    return manifest.progress


def load_critic(path: Path, model: RewardModel, *, is_shared: bool, ranks: Ranks) -> None:
    """Restore trunk and head of `model` from the critic in a checkpoint; its scores get the unit of the reward.

    With adapters, only they are restored. Every rank calls it. Raises ConfigError as `load` does.
    """
    _read_manifest(path)
    trunk, head_name = ("model", "critic.weight") if is_shared else ("critic.causal_lm", "critic.value_head.weight")
    head, scale = torch.zeros(model.score.weight.shape[1]), ReturnScale().tensor()
    state = {head_name: head, _CRITIC_SCALE: scale}
    for name, parameter in model.causal_lm.named_parameters():
        if parameter.requires_grad:
            state[f"{trunk}.{name}"] = parameter.detach()
    _read(path, state)
    unit = scale_of(scale)
    set_score(model, head[None] * unit.std, ranks=ranks)
    model.offset = unit.mean


def _read(path: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state` from a checkpoint. Collective. Raises ConfigError."""
    try:
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    except (OSError, CheckpointException) as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {error}; it must be of the same model") from error


def _state(models: StepModels) -> dict[str, Tensor]:
    """Every tensor that training changes, by name. The optimizer's hyperparameters come from the configuration.

    All ranks share one random state: they have the same seed, and a step uses no random numbers.
    """
    # With adapters, the model's own weights are frozen and stay in its folder.
    trained = ((name, parameter) for name, parameter in named_shards(models.policy) if parameter.requires_grad)
    state = {_RNG: torch.get_rng_state()} | _parameters("model", "optimizer", trained, models.optimizer)
    if (critic := models.critic) is not None:
        state |= {_CRITIC_STEP: torch.tensor(critic.schedule.last_epoch), _CRITIC_SCALE: critic.scale.tensor()}
        state |= _parameters("critic", "critic_optimizer", critic_shards(critic), critic.optimizer)
    return state


def _parameters(
    of_model: str, of_optimizer: str, trained: Iterator[tuple[str, nn.Parameter]], optimizer: torch.optim.AdamW
) -> dict[str, Tensor]:
    """The `trained` parameters and what `optimizer` keeps of them, under the names of both."""
    begin_moments(optimizer)
    found = dict[str, Tensor]()
    for name, parameter in trained:
        found[f"{of_model}.{name}"] = parameter.detach()
        for moment, value in optimizer.state[parameter].items():
            found[f"{of_optimizer}.{moment}.{name}"] = value
    return found


def _set_schedule(schedule: LambdaLR, optimizer: torch.optim.AdamW, step: int) -> None:
    rates = [lr * fraction(step) for lr, fraction in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_last_lr": rates})


def _on_first_rank(action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Run `action` on rank 0 while the other ranks wait. If it fails, every other rank raises OSError."""
    failure: OSError | FencedOut | None = None
    if dist.get_rank(group) == 0:
        try:
            action()
        except (OSError, FencedOut) as error:
            failure = error
    failed = torch.tensor(float(failure is not None))
    dist.broadcast(failed, src=0, group=group)
    if failed:
        raise failure or OSError("rank 0 could not write; see its error message")


def _begin(path: Path, fence: Fence) -> None:
    """Make an empty folder in the place of what is at `path`."""
    with fence.held():
        if path.is_symlink() or path.is_file():
            path.unlink()  # only the link: its target may belong to another program
        elif path.exists():
            _remove(path)
        path.mkdir(parents=True)


def _finish(path: Path, snapshot: Snapshot, fence: Fence) -> None:
    # Every shard is read, which takes longer than a fence may be held.
    blobs = {file.name: blob_of(file) for file in sorted(path.iterdir())}
    files = [_File(name=name, num_bytes=blob.num_bytes, xxh3=blob.root) for name, blob in blobs.items()]
    sync_path(path)  # the shards' directory entries must be durable before the manifest's
    manifest = _Manifest(progress=snapshot.progress, schedule_step=snapshot.schedule_step, files=files)
    with fence.held():
        write_sealed(path / MANIFEST, manifest, schema=_SCHEMA)
        sync_path(path.parent)


def _read_manifest(path: Path) -> _Manifest:
    """Read the manifest of a checkpoint. Raises ConfigError if it is damaged, or if a shard has another size."""
    manifest = read_sealed(path / MANIFEST, _Manifest, schema=_SCHEMA, cure="restore the checkpoint from a copy")
    for file in manifest.files:
        shard = path / file.name
        num_bytes = shard.stat().st_size if shard.is_file() else 0
        if num_bytes != file.num_bytes:
            raise ConfigError(
                f"{shard} has {num_bytes} bytes, but its manifest says {file.num_bytes}; restore it from a copy"
            )
    if manifest.progress.step != step_of(path):
        raise ConfigError(f"{path} contains step {manifest.progress.step}; rename the folder to match that step")
    return manifest


def _is_checkpoint(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def _was_finished(path: Path) -> bool:
    """Whether a manifest was ever written; True also if it has since been replaced by a folder or a broken link."""
    return (path / MANIFEST).exists() or (path / MANIFEST).is_symlink()


def _keep_newest(folder: Path, keep: int) -> None:
    kept = finished_checkpoints(folder)[-keep:]
    for path in folder.glob("step_*"):
        if path not in kept and _is_checkpoint(path):
            try:
                _remove(path)
            except OSError as error:
                log.warning("cannot remove the old checkpoint %s; the next checkpoint tries again: %s", path, error)


def _remove(path: Path) -> None:
    # The manifest goes first: after a crash half-way, the folder must not look like a finished checkpoint.
    manifest = path / MANIFEST
    if manifest.is_dir() and not manifest.is_symlink():
        shutil.rmtree(manifest)
    manifest.unlink(missing_ok=True)
    shutil.rmtree(path)
