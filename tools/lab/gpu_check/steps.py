"""Three optimizer steps on the device against the same on the CPU: gradients, weights, and that every tensor moves.

The device's rank is an NCCL rank on a GPU. The CPU cuts the batch into other micro-batches, so that the reduced form
compares something as well. Adam divides each gradient by its own size, so where one is close to zero,
a rounding may turn the sign of an update. Therefore updates are compared as a whole, by tensor.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from slipstream.learner.ranks.ranks import leave_ranks
from slipstream.tools.lab.gpu_check import small
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.kernels import relative_error

NUM_STEPS = 3
FAMILIES = {"dense": "qwen3", "experts": "qwen3_moe"}
# Of the gradient's norm, and of a tensor's change over all steps (root of the mean squared error). In bfloat16 a token
# whose router nearly ties may go to other experts: 0.51 was found on an H100. Unrelated changes would differ by 1.4.
LIMITS = {
    ("dense", "float32"): (1e-4, 5e-3),
    ("dense", "bfloat16"): (5e-2, 0.5),
    ("experts", "float32"): (1e-4, 5e-3),
    ("experts", "bfloat16"): (5e-2, 0.8),
}


def check(findings: Findings, device: str) -> None:
    """A dense model and one with experts, in both dtypes."""
    ranks = small.one_rank(device)
    findings.note("backend of the rank", torch.distributed.get_backend())
    with tempfile.TemporaryDirectory() as root:
        for (kind, dtype), limits in LIMITS.items():
            folder = small.save(FAMILIES[kind], Path(root))
            mine = small.load(folder, ranks=ranks, dtype=dtype)
            theirs = small.load(folder, ranks=small.on_cpu(ranks), dtype=dtype, micro_batch_tokens=128)
            _compare(findings, f"{kind}, {dtype}", mine, theirs, limits)
    leave_ranks()


def _compare(
    findings: Findings, what: str, mine: small.Trained, theirs: small.Trained, limits: tuple[float, float]
) -> None:
    max_norm_error, max_change_error = limits
    before, norms = theirs.weights(), []
    findings.require(f"{what}: same weights at the start", equal(before, mine.weights()))
    for step in range(NUM_STEPS):
        batch = small.batch(step, mine.model.vocab_size)
        found, expected = mine.step(batch), theirs.step(batch)
        findings.require(f"{what}: step {step} is not skipped", not found.skipped and not expected.skipped)
        norms.append(abs(found.grad_norm / expected.grad_norm - 1))
    findings.at_most(f"{what}: error of the gradient's norm, first step", norms[0], max_norm_error)
    findings.note(f"{what}: error of the gradient's norm, last step", norms[-1])
    after, wanted = mine.weights(), theirs.weights()
    still = [name for name in after if torch.equal(after[name], before[name])]
    findings.require(f"{what}: every tensor moves", not still, ", ".join(still)[:200] or f"{len(after)} tensors")
    errors = {name: relative_error(after[name] - before[name], wanted[name] - before[name]) for name in after}
    worst = max(errors, key=lambda name: errors[name])
    findings.at_most(f"{what}: error of a tensor's change, the largest ({worst})", errors[worst], max_change_error)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit by bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
