"""What we ask of vLLM and how its answers read: the only place that knows its options.

vLLM reads the environment while it is imported, so import this module after prepare_environment().
"""

import os
from dataclasses import asdict
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from actors.engine import Completion, EngineError
from actors.receive import ReceiverInfo
from actors.staged_transfer import BACKEND, WORKER_EXTENSION
from common.trajectory import Sampling, VersionSpan

CPU_OPTIONS = {
    "enforce_eager": True,  # compiling takes 34 to 76 s of start for 1.1 to 1.5 times the speed
    "block_size": 32,  # prefix hits on short prompts
    "enable_chunked_prefill": False,  # a prompt in parts turns a request's own generator back, which CPUs cannot
}
CUDA_OPTIONS = {"enforce_eager": False, "gpu_memory_utilization": 0.9}


def start_vllm(model_path: str, receiver: ReceiverInfo, *, policy_version: int, **options: Any) -> LLMEngine:
    """Return vLLM's LLMEngine, ready to step, with our transfer engine connected. `options` are EngineArgs'."""
    if torch.cuda.is_available():
        del options["kv_cache_memory_bytes"]
    else:
        # OpenMP read OMP_NUM_THREADS when torch was imported, maybe too early; the setting is this thread's own.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,  # tokens in, tokens out
            generation_config="vllm",  # else the folder's temperature, top-p and top-k would bend ours
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            enable_prefix_caching=True,
            async_scheduling=False,  # else a batch is in flight between steps, and a commit would tag it wrongly
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=WORKER_EXTENSION,
            **(CUDA_OPTIONS if torch.cuda.is_available() else CPU_OPTIONS),
            **options,
        )
    )
    llm.collective_rpc("init_weight_transfer_engine", args=(asdict(receiver),))
    llm.set_weight_version(str(policy_version))
    return llm


def sampling_params(
    sampling: Sampling, *, num_tokens: int, seed: int | None, stop_token_ids: list[int]
) -> SamplingParams:
    """`sampling` for one request of at most `num_tokens`."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=num_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: CompletionOutput) -> Completion:
    """What a finished output says, in our words. Raises EngineError for one that vLLM gave up on."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a generation with {output.finish_reason!r}")
    return Completion(
        tokens=list(output.token_ids),
        logprobs=list(output.logprobs.logprobs),
        version_spans=[
            VersionSpan(start=span.start, stop=span.end, policy_version=int(span.version))
            for span in output.weight_versions
        ],
        finish_reason=output.finish_reason,
    )
