"""The environment variables that vLLM needs when it is imported."""

import os

import torch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in our process, so that we control its steps
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # a failed broadcast ends its group; torch's default ends the process
}
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several actors share the cores: with more threads each was 12 to 15 times slower
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise an engine with several workers needs as many NUMA nodes
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for log-probabilities compiles for 4 to 9 s
}


def vllm_environment() -> dict[str, str]:
    """The variables for a process that imports vLLM; variables that are already set keep their values."""
    wanted = ENVIRONMENT if torch.cuda.is_available() else ENVIRONMENT | CPU_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
