"""What we ask of vLLM and how its answers read: the only place that knows its options.

vLLM reads the environment while it is imported, so import this module where vllm_environment() is set.
"""

import os
from dataclasses import asdict

import numpy as np
import torch
import vllm
from transformers import AutoTokenizer
from vllm import EngineArgs, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from actors.candidates import CandidatesCut, kept_of_candidates
from actors.orders import Ended, EngineSettings, Failed
from actors.staged_transfer import BACKEND, WORKER_EXTENSION
from common.chat import end_tokens
from common.kept_sets import MAX_KEPT_TOKENS
from common.trajectory import Sampling, VersionSpan

CPU_OPTIONS = {
    "enforce_eager": True,  # compiling takes 34 to 76 s of start for 1.1 to 1.5 times the speed
    "block_size": 32,  # prefix hits on short prompts
    "enable_chunked_prefill": False,  # a prompt in parts turns a request's own generator back, which CPUs cannot
}
CUDA_OPTIONS = {"enforce_eager": False, "gpu_memory_utilization": 0.9}


def start_vllm(settings: EngineSettings) -> LLMEngine:
    """Return vLLM's LLMEngine, ready to step, with our transfer engine connected. Blocks for 5 to 15 s.

    Raises ValueError where vLLM refuses the model or the sizes.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # OpenMP read OMP_NUM_THREADS when torch was imported, maybe too early; the setting is this thread's own.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    llm = LLMEngine.from_engine_args(
        EngineArgs(
            model=settings.model_path,
            seed=settings.seed,
            dtype=settings.dtype,
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_episodes,
            tensor_parallel_size=settings.tensor_parallel,
            kv_cache_memory_bytes=None if on_gpu else settings.kv_cache_bytes,
            skip_tokenizer_init=True,  # tokens in, tokens out
            generation_config="vllm",  # else the folder's temperature, top-p and top-k would bend ours
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            max_logprobs=MAX_KEPT_TOKENS,
            enable_prefix_caching=True,
            async_scheduling=False,  # else a batch is in flight between steps, and a commit would tag it wrongly
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=WORKER_EXTENSION,
            **(CUDA_OPTIONS if on_gpu else CPU_OPTIONS),
        )
    )
    llm.collective_rpc("init_weight_transfer_engine", args=(asdict(settings.receiver),))
    llm.set_weight_version(str(settings.policy_version))
    return llm


def engine_name() -> str:
    """vLLM's version and the kind of device that it runs on, for people."""
    return f"vllm {vllm.__version__} {current_platform.device_type}"


def sampling_params(
    sampling: Sampling, *, num_tokens: int, seed: int | None, stop_token_ids: list[int], num_candidates: int
) -> SamplingParams:
    """`sampling` for one request of at most `num_tokens`, its answer with `num_candidates` for each of them."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=num_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=num_candidates,  # beside the sampled token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def over(output: RequestOutput, *, num_candidates: int, vocab_size: int) -> Ended | Failed:
    """What a finished output says, in our words. `num_candidates` came with each token."""
    call, completion = int(output.request_id), output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return Failed(call=call, why=f"vLLM ended a generation with {completion.finish_reason!r}")
    width = 1 + num_candidates  # the sampled token comes first, and again in its place
    kept = None
    if num_candidates:
        try:
            kept = kept_of_candidates(
                np.array(completion.logprobs.token_ids, dtype=np.int32).reshape(-1, width)[:, 1:],
                np.array(completion.logprobs.logprobs, dtype=np.float32).reshape(-1, width)[:, 1:],
                vocab_size=vocab_size,
            )
        except CandidatesCut as error:
            return Failed(call=call, why=str(error))
    return Ended(
        call=call,
        tokens=list(completion.token_ids),
        logprobs=list(completion.logprobs.logprobs[::width]),
        kept=kept,
        version_spans=[
            VersionSpan(start=span.start, stop=span.end, policy_version=int(span.version))
            for span in completion.weight_versions
        ],
        finish_reason=completion.finish_reason,
    )


def stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a turn of the model in this folder.

    Raises ValueError where there is none: every generation would run to its limit.
    """
    found = end_tokens(AutoTokenizer.from_pretrained(model_path))
    if not found:
        raise ValueError(f"`model.path` {model_path} names no end-of-turn token; set eos_token in its tokenizer")
    return sorted(found)
