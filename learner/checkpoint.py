"""Checkpoints: what the learner needs to go on as if it had never stopped, whole or not at all.

    checkpoints/step_000020/shard-*.safetensors    model, optimizer and random state, each rank its own shards
    checkpoints/step_000020/manifest.json          written last: without it the folder is the leaving of a crash

Shards are safetensors, so nothing that is read back can run code; a checkpoint of 2 ranks loads on 1 and the reverse.
`learner.checkpoint_writer` writes them while training goes on.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager
from torch.optim.lr_scheduler import LambdaLR

from common.run_dir import sync_path
from learner.model.critic import Critic, critic_shards
from learner.model.packed_model import PackedModel, named_shards
from learner.objective.return_scale import scale_of

MANIFEST = "manifest.json"
_RNG = "rng"
_CRITIC_STEP, _CRITIC_SCALE = "critic_schedule_step", "critic_scale"
_SCHEMA = 1


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the learner stands in the run, apart from its weights."""

    step: int  # optimizer steps made
    policy_version: int  # of the weights in this checkpoint
    highest_published: int  # a resumed learner numbers its versions from above this
    next_group_id: int
    tokens_trained: int


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_bytes: int


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    progress: Progress
    schedule_step: int
    files: list[_File]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a checkpoint holds, as a copy that training does not change."""

    state: dict[str, Tensor]
    schedule_step: int
    progress: Progress


def take_snapshot(
    model: PackedModel,
    optimizer: torch.optim.AdamW,
    schedule: LambdaLR,
    critic: Critic | None = None,
    *,
    progress: Progress,
    stager: DefaultStager,
) -> Snapshot:
    """Copy this rank's shards to the host, into the memory that `stager` keeps for the next copy too."""
    state = stager.stage(_state(model, optimizer, critic))
    assert isinstance(state, dict)
    return Snapshot(state=state, schedule_step=schedule.last_epoch, progress=progress)


def write(folder: Path, snapshot: Snapshot, *, group: dist.ProcessGroup, keep: int) -> None:
    """Write `folder/step_NNNNNN`, then remove all but the newest `keep`.

    Every rank of `group`, which is over gloo, calls it, on one file system. The checkpoint is durable when it returns:
    its bytes and then its manifest are synced to the disk.
    Raises ValueError on every rank when it cannot be written, with the reason; the older checkpoints stay.
    """
    path, rank = folder / f"step_{snapshot.progress.step:06d}", dist.get_rank(group)
    try:
        _on_first_rank(partial(_make_empty, path), group)
        state_dict_saver.save(
            snapshot.state,
            storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True),
            process_group=group,
        )
        _on_first_rank(partial(_write_manifest, path, snapshot), group)
    except (OSError, CheckpointException) as error:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise ValueError(
            f"cannot write the checkpoint {path}: {error}; make room or mend the disk, the older ones are whole"
        ) from error
    if rank == 0:
        _keep_newest(folder, keep)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; None where there is none, even if one was begun."""
    return max(_whole_checkpoints(folder), key=step_of, default=None)


def step_of(path: Path) -> int:
    """The step that a checkpoint was written after."""
    return int(path.name.removeprefix("step_"))


def load(
    path: Path,
    *,
    model: PackedModel,
    optimizer: torch.optim.AdamW,
    schedule: LambdaLR,
    critic: Critic | None = None,
) -> Progress:
    """Put model, optimizer, schedule, critic and random state back as they were saved. Every rank calls it.

    Raises ValueError for a checkpoint that is not whole or not of this model; then nothing may be trained on, as some
    tensors may have been read already.
    """
    manifest = _read_manifest(path)
    state = _state(model, optimizer, critic)
    try:
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    except (OSError, CheckpointException) as error:
        raise ValueError(
            f"cannot read the checkpoint {path}: {error}; it must be of this very model, "
            "or remove it to resume from an older one"
        ) from error
    torch.set_rng_state(state[_RNG])
    _set_schedule(schedule, optimizer, manifest.schedule_step)
    if critic is not None:
        _set_schedule(critic.schedule, critic.optimizer, int(state[_CRITIC_STEP]))
        critic.scale = scale_of(state[_CRITIC_SCALE])
    return manifest.progress


def _state(model: PackedModel, optimizer: torch.optim.AdamW, critic: Critic | None) -> dict[str, Tensor]:
    """Every tensor that training changes, by name. What the optimizer holds as numbers comes from the configuration.

    The random state is one for all ranks: they are seeded alike, and nothing in a step draws from it.
    """
    _fill(optimizer)
    state = {_RNG: torch.get_rng_state()}
    for name, parameter in named_shards(model):
        if parameter.requires_grad:  # beside adapters the model's own weights are frozen: they are in its folder
            state[f"model.{name}"] = parameter.detach()
            for moment, value in optimizer.state[parameter].items():
                state[f"optimizer.{moment}.{name}"] = value
    return state if critic is None else state | _critic_state(critic)


def _critic_state(critic: Critic) -> dict[str, Tensor]:
    _fill(critic.optimizer)
    state = {_CRITIC_STEP: torch.tensor(critic.schedule.last_epoch), _CRITIC_SCALE: critic.scale.tensor()}
    for name, parameter in critic_shards(critic):
        state[f"critic.{name}"] = parameter.detach()
        for moment, value in critic.optimizer.state[parameter].items():
            state[f"critic_optimizer.{moment}.{name}"] = value
    return state


def _fill(optimizer: torch.optim.AdamW) -> None:
    """Give AdamW the state that its first step would give, so that there are tensors to write and to read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),  # where fused AdamW looks for it
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _set_schedule(schedule: LambdaLR, optimizer: torch.optim.AdamW, step: int) -> None:
    rates = [lr * fraction(step) for lr, fraction in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": step, "_last_lr": rates})


def _on_first_rank(action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do `action` on rank 0 while the others wait for it. Where it fails, every rank raises OSError."""
    failure: OSError | None = None
    if dist.get_rank(group) == 0:
        try:
            action()
        except OSError as error:
            failure = error
    failed = torch.tensor(float(failure is not None))
    dist.broadcast(failed, src=0, group=group)
    if failed:
        raise failure or OSError("the first rank could not write; its own message says why")


def _make_empty(path: Path) -> None:
    if path.exists():
        _remove(path)
    path.mkdir(parents=True)


def _write_manifest(path: Path, snapshot: Snapshot) -> None:
    files = [_File(name=file.name, num_bytes=file.stat().st_size) for file in sorted(path.iterdir())]
    manifest = _Manifest(
        schema=_SCHEMA, progress=snapshot.progress, schedule_step=snapshot.schedule_step, files=files
    )  # fmt: skip
    unnamed = path / f"{MANIFEST}.tmp"
    with unnamed.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(manifest)))
        stream.flush()
        os.fsync(stream.fileno())
    sync_path(path)  # the names of the shards, before that of the manifest
    unnamed.rename(path / MANIFEST)
    sync_path(path)
    sync_path(path.parent)


def _read_manifest(path: Path) -> _Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}; remove it to resume from an older one") from error
    if manifest.schema != _SCHEMA:
        raise ValueError(
            f"{path} has schema {manifest.schema}, this program reads {_SCHEMA}; use the one that wrote it"
        )
    for file in manifest.files:
        shard = path / file.name
        num_bytes = shard.stat().st_size if shard.is_file() else 0
        if num_bytes != file.num_bytes:
            raise ValueError(
                f"{shard} holds {num_bytes} bytes, the manifest says {file.num_bytes}; "
                "remove the checkpoint to resume from an older one"
            )
    return manifest


def _whole_checkpoints(folder: Path) -> list[Path]:
    return sorted((manifest.parent for manifest in folder.glob(f"step_*/{MANIFEST}")), key=step_of)


def _keep_newest(folder: Path, keep: int) -> None:
    kept = _whole_checkpoints(folder)[-keep:]
    for path in folder.glob("step_*"):
        if path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    # The manifest first: a crash half-way must not leave a folder that looks whole.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
