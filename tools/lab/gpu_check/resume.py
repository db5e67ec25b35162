"""Checkpoint, kill -9 in the middle of the next one, resume: the state is the same bit by bit, and so is the next step.

On a GPU the backward pass of attention adds in no fixed order, so the next step has a tolerance there.
"""

import hashlib
import os
import signal
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

from slipstream.learner.checkpoint import checkpoint
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.checkpoint_writer import CheckpointWriter
from slipstream.learner.ranks.ranks import leave_ranks
from slipstream.tools.lab.bench.weights_stage import SPAWN
from slipstream.tools.lab.gpu_check import small
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.kernels import relative_error

FAMILY = "qwen3"
LAST_STEP = 2  # whose checkpoint is durable when the process is killed
CHILD_S = {"cuda": 60.0, "cpu": 240.0}
MAX_CHANGE_ERROR = {"cpu": 0.0, "cuda": 0.1}  # of a tensor's change in the next step, see `steps`


def check(findings: Findings, device: str) -> None:
    """One process without a break, and one that is killed; then a resumed one beside the first."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    ranks = small.one_rank(device)
    with tempfile.TemporaryDirectory() as root:
        folder, checkpoints = small.save(FAMILY, Path(root)), Path(root) / "checkpoints"
        child = SPAWN.Process(target=_train_and_die, args=(folder, checkpoints, device, dtype))
        child.start()
        steady = small.load(folder, ranks=ranks, dtype=dtype)
        for step in range(1, LAST_STEP + 1):
            steady.step(small.batch(step, steady.model.vocab_size))
        child.join(CHILD_S[device])
        findings.require("the first process was killed", child.exitcode == -signal.SIGKILL, f"exit {child.exitcode}")
        writer = CheckpointWriter(checkpoints, ranks=ranks, keep=2)
        newest = checkpoint.latest_checkpoint(checkpoints)
        findings.require(
            "the newest whole checkpoint is of the last durable step",
            newest is not None and checkpoint.step_of(newest) == LAST_STEP,
            newest.name if newest else "none",
        )
        assert newest is not None
        again = small.load(folder, ranks=ranks, dtype=dtype)
        checkpoint.load(newest, model=again.model, optimizer=again.optimizer, schedule=again.schedule)
        written = (checkpoints.parent / "state").read_text()
        findings.require("weights and moments are the same, bit by bit", state_hash(again) == written)
        _next_step(findings, steady, again, max_error=MAX_CHANGE_ERROR[device])
        writer.close()
    leave_ranks()


def _next_step(findings: Findings, steady: small.Trained, again: small.Trained, *, max_error: float) -> None:
    batch, before = small.batch(LAST_STEP + 1, steady.model.vocab_size), again.weights()
    expected, found = steady.step(batch), again.step(batch)
    norms = abs(found.grad_norm / expected.grad_norm - 1)
    findings.at_most("next step, gradient's norm: off by", norms, max_error)
    after, wanted = again.weights(), steady.weights()
    worst = max(relative_error(after[name] - before[name], wanted[name] - before[name]) for name in after)
    findings.at_most("next step, a tensor's change: off by", worst, max_error)


def _train_and_die(folder: Path, checkpoints: Path, device: str, dtype: str) -> None:
    """Train, write a checkpoint, begin the next one, and be killed."""
    ranks = small.one_rank(device)
    trained = small.load(folder, ranks=ranks, dtype=dtype)
    writer, durable = CheckpointWriter(checkpoints, ranks=ranks, keep=2), threading.Event()
    for step in range(1, LAST_STEP + 1):
        trained.step(small.batch(step, trained.model.vocab_size))
    writer.begin(
        trained.model, trained.optimizer, trained.schedule, progress=_progress(LAST_STEP), once_durable=durable.set
    )
    writer.wait()
    (checkpoints.parent / "state").write_text(state_hash(trained))
    trained.step(small.batch(LAST_STEP + 1, trained.model.vocab_size))
    writer.begin(
        trained.model,
        trained.optimizer,
        trained.schedule,
        progress=_progress(LAST_STEP + 1),
        once_durable=lambda: None,
    )
    os.kill(os.getpid(), signal.SIGKILL)


def _progress(step: int) -> Progress:
    return Progress(step=step, policy_version=step, highest_published=-1, next_group_id=0, tokens_trained=0)


def state_hash(trained: small.Trained) -> str:
    """A hash of every weight and moment, by their order in the optimizer."""
    digest = hashlib.sha256()
    for parameter in trained.optimizer.param_groups[0]["params"]:
        state = trained.optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return small.local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
