"""The head's log-probabilities, from states in bfloat16 and in float32, against float64."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.learner.model.logprobs import chunked_logprobs
from slipstream.tools.lab.gpu_check.findings import Findings
from slipstream.tools.lab.gpu_check.kernels import relative_error

REPEATS = 5
MAX_ERROR_NATS = {"bfloat16 states": 1e-3, "float32 states": 1e-4}  # of one token
MAX_GRADIENT_ERROR = 5e-3  # bfloat16 rounds the gradient of the logits, and the result, to 8 bits


def check(findings: Findings, device: str) -> None:
    """Values and gradients with a bound, and times; then what logits that are rounded to bfloat16 would cost."""
    num_tokens, width, vocab_size, chunk = (4096, 1536, 151_936, 1024) if device == "cuda" else (64, 64, 1000, 16)
    torch.manual_seed(0)
    where = torch.device(device)
    states = torch.randn(num_tokens, width, device=where).bfloat16()
    weight = (torch.randn(vocab_size, width, device=where) * width**-0.5).bfloat16()
    targets = torch.randint(0, vocab_size, (num_tokens,), device=where)
    findings.note("shape", f"{num_tokens} tokens, width {width}, {vocab_size} words")

    def ours(hidden: Tensor, head: Tensor) -> Tensor:
        return chunked_logprobs(hidden, head, None, targets, temperature=1.0, chunk_tokens=chunk).logprobs

    exact = torch.cat(
        [
            (part.double() @ weight.double().T).log_softmax(-1).gather(1, of_part[:, None]).squeeze(1)
            for part, of_part in zip(torch.split(states, chunk // 4), torch.split(targets, chunk // 4), strict=True)
        ]
    )
    exact_gradient = _gradient(ours, states.double(), weight.double())
    ways = {"bfloat16 states": (states, weight), "float32 states": (states.float(), weight.float())}
    for name, (hidden, head) in ways.items():
        with torch.no_grad():
            error = float((ours(hidden, head).double() - exact).abs().max())
        findings.at_most(f"{name}: largest error of a token", error, MAX_ERROR_NATS[name], "nats")
        gradient = _gradient(ours, hidden, head)
        findings.at_most(f"{name}: error of the gradient", relative_error(gradient, exact_gradient), MAX_GRADIENT_ERROR)
        findings.note(f"{name}: forward and backward", 1e3 * _seconds(ours, hidden, head), "ms")
    with torch.no_grad():
        rounded = (states @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    findings.note(
        "logits rounded to bfloat16, for comparison: largest error", float((rounded - exact).abs().max()), "nats"
    )


def _gradient(ours: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, head: Tensor) -> Tensor:
    leaf = hidden.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ours(leaf, head).sum(), leaf)
    return gradient


def _seconds(ours: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, head: Tensor) -> float:
    return _median_s(lambda: _gradient(ours, hidden, head), hidden.device)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
