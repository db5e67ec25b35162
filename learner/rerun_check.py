"""Compares the weights of a re-run with those of its run, bit by bit."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.transfer.model_folder import weight_files
from slipstream.learner.checkpoint.checkpoint import latest_checkpoint, step_of
from slipstream.learner.checkpoint.conditions import differences, settings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunCheck:
    """The result of comparing a finished re-run with its run."""

    text: str
    exit_code: int  # 1 if the same conditions gave other weights


def check_rerun(
    config: Config, run_dir: RunDir, *, original_config: Config, original: RunDir, archived: list[str]
) -> RerunCheck:
    """Compare the two trained models. Different weights are a failure only if the conditions are the same.

    `archived` says how those of the archived steps differ: a run may have continued with other settings.
    """
    step = _trained_step(run_dir)
    if (_trained_step(original), original_config.learner.steps) != (step, step) or not original.trained_model.is_dir():
        return RerunCheck(
            text=f"nothing to compare with: {original.path} contains no trained model of step {step}", exit_code=0
        )
    found = difference(run_dir.trained_model, original.trained_model)
    if not found:
        return RerunCheck(text=f"identical to {original.trained_model}", exit_code=0)
    theirs, ours = (settings_of(one) | {"model.path": one.model.path} for one in (original_config, config))
    changed = differences(theirs, ours) or archived
    text = "; ".join([f"not identical to {original.trained_model}: {found}", *changed])
    return RerunCheck(text=text, exit_code=0 if changed else 1)


def _trained_step(run_dir: RunDir) -> int | None:
    """The step of the newest checkpoint; None before the first."""
    newest = latest_checkpoint(run_dir.checkpoints)
    return step_of(newest) if newest else None


def difference(ours: Path, theirs: Path) -> str:
    """How two models differ, and in which tensor first; "" if all names, shapes, dtypes and bits are equal.

    Raises OSError for a folder without weights.
    """
    our_tensors, their_tensors = _tensors(ours), _tensors(theirs)
    names = sorted(our_tensors.keys() | their_tensors.keys())
    different = {}
    for name in names:
        if name not in our_tensors or name not in their_tensors:
            different[name] = "which only one of the two has"
        elif how := _how_different(our_tensors[name], their_tensors[name]):
            different[name] = how
    if not different:
        return ""
    first, how = next(iter(different.items()))
    return f"{len(different)} of {len(names)} tensors differ, first {first}, {how}"


def _how_different(ours: Tensor, theirs: Tensor) -> str:
    """How two tensors differ; empty if they are equal."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype} of {tuple(ours.shape)}, not {theirs.dtype} of {tuple(theirs.shape)}"
    # Compared as bytes: NaN equals itself, and 0 differs from -0.
    if torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
        return ""
    return f"by up to {float((ours.double() - theirs.double()).abs().max()):.3g}"


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The model's tensors by name, mapped into memory and read when they are compared."""
    tensors = dict[str, Tensor]()
    for path in weight_files(folder):
        tensors |= load_file(path)
    if not tensors:
        raise FileNotFoundError(f"{folder} contains no .safetensors files")
    return tensors
