"""Starts vLLM and translates its results: the only module that knows vLLM's options.

vLLM reads the environment when it is imported, so import this module only in a process that has vllm_environment().
"""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from slipstream.actors.engine.candidates import CandidatesCut, kept_of_candidates
from slipstream.actors.engine.engine import Completion
from slipstream.actors.engine.orders import Ended, EngineSettings, Failed, Generate
from slipstream.actors.engine.shadow_memory import room_for_shadow
from slipstream.actors.engine.staged_transfer import BACKEND, WORKER_EXTENSION
from slipstream.common.process.kept_memory import keep_freed_memory
from slipstream.common.records.kept_sets import MAX_KEPT_TOKENS
from slipstream.common.records.trajectory import VersionSpan
from slipstream.common.text.codec import end_tokens
from slipstream.common.text.tokenizer import absent_ids, load_tokenizer, no_own_code
from slipstream.common.transfer.model_folder import has_weights, tensor_shapes

CPU_OPTIONS = {
    "enforce_eager": True,  # compiling takes 34 to 76 s of start for 1.1 to 1.5 times the speed
    "block_size": 32,  # prefix hits on short prompts
    "enable_chunked_prefill": False,  # a prompt in parts resets a request's random generator, which CPUs do not support
}
CPU_KV_CACHE_BYTES = 64 << 20


def start_vllm(settings: EngineSettings) -> LLMEngine:
    """Return vLLM's LLMEngine, ready to step, with our transfer engine connected. Blocks for 5 to 15 s.

    Raises ValueError if vLLM refuses the model or the sizes.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # OpenMP may have read OMP_NUM_THREADS too early, when torch was imported. This sets it for this thread.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        keep_freed_memory()
    gpu_bytes = current_platform.get_device_total_memory() if on_gpu else 0
    arguments = _arguments(settings, gpu_bytes=gpu_bytes)
    with no_own_code(settings.model_path):
        if not on_gpu and arguments.create_model_config().is_hybrid:
            # vLLM caches the states of layers only at the ends of prefills in parts, which CPU_OPTIONS exclude.
            arguments.enable_prefix_caching = False
        llm = LLMEngine.from_engine_args(arguments)
    connected = {
        "receiver": asdict(settings.receiver),
        "shadow_room_bytes": shadow_room_bytes(settings, gpu_bytes),
        "absent": absent_ids(settings.model_path, llm.model_config.get_vocab_size()),
    }
    llm.collective_rpc("init_weight_transfer_engine", args=(connected,))
    llm.set_weight_version(str(settings.policy_version))
    return llm


def _arguments(settings: EngineSettings, *, gpu_bytes: int) -> EngineArgs:
    """vLLM's arguments; `gpu_bytes` is the memory of each GPU, 0 on a CPU."""
    on_gpu = gpu_bytes > 0
    return EngineArgs(
        model=settings.model_path,
        load_format="auto" if has_weights(Path(settings.model_path)) else "dummy",  # the run's weights come at once
        trust_remote_code=False,
        seed=settings.seed,
        dtype=_dtype(settings.model.dtype, on_gpu=on_gpu),
        max_model_len=settings.model.max_tokens,
        max_num_seqs=settings.actors.max_episodes + 1,  # and the probe of new weights
        tensor_parallel_size=settings.actors.tensor_parallel,
        skip_tokenizer_init=True,  # tokens in, tokens out
        generation_config="vllm",  # otherwise the folder's temperature, top-p and top-k would override ours
        logprobs_mode="processed_logprobs",  # of the distribution from which tokens are sampled
        max_logprobs=MAX_KEPT_TOKENS,
        enable_prefix_caching=True,
        language_model_only=True,  # a vision-language model gets no images
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER_EXTENSION,
        **(gpu_options(settings, gpu_bytes) if on_gpu else _cpu_options(settings.actors.kv_cache_bytes)),
    )


def _dtype(dtype: str, *, on_gpu: bool) -> str:
    """The same as a learner's `resolve_dtype`: an engine without a run may still have "auto"."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype


def _cpu_options(kv_cache_bytes: int) -> dict[str, Any]:
    return CPU_OPTIONS | {"kv_cache_memory_bytes": kv_cache_bytes or CPU_KV_CACHE_BYTES}


def gpu_options(settings: EngineSettings, gpu_bytes: int) -> dict[str, Any]:
    """The options on a GPU: logits in float32, as the learner computes them; overlapped scheduling; and the memory.

    With a size of its KV cache an engine shares its GPU: vLLM then asks for that size, and for no share of the GPU. It
    still refuses to start where the share is not free, so the share is next to nothing. Else vLLM gets the engine's
    share without the room for a shadow model.
    """
    options: dict[str, Any] = {"hf_overrides": {"head_dtype": "float32"}, "async_scheduling": True}
    if settings.actors.kv_cache_bytes:
        return options | {"kv_cache_memory_bytes": settings.actors.kv_cache_bytes, "gpu_memory_utilization": 0.01}
    share = settings.actors.gpu_memory_utilization - shadow_room_bytes(settings, gpu_bytes) / gpu_bytes
    return options | {"gpu_memory_utilization": share}


def shadow_room_bytes(settings: EngineSettings, gpu_bytes: int) -> int:
    """The bytes of each GPU of `gpu_bytes` that this engine leaves to a shadow model; 0 on a CPU.

    Also 0 for an engine without a run, whose weights never change. Raises ValueError if the folder has neither weights
    nor their shapes, or vLLM refuses its model.
    """
    if not gpu_bytes or settings.actors.kv_cache_bytes or not settings.receiver.redis_url:
        return 0
    shapes = tensor_shapes(Path(settings.model_path)).values()
    dtype = getattr(torch, _dtype(settings.model.dtype, on_gpu=True))
    weights_bytes = dtype.itemsize * sum(map(math.prod, shapes)) // settings.actors.tensor_parallel
    return room_for_shadow(
        share_bytes=int(settings.actors.gpu_memory_utilization * gpu_bytes),
        weights_bytes=weights_bytes,
        episode_bytes=_episode_bytes(settings, dtype),
    )


def _episode_bytes(settings: EngineSettings, dtype: torch.dtype) -> int:
    """The keys and values of the longest episode on each GPU, if every layer attends to all of it."""
    model = EngineArgs(
        model=settings.model_path, max_model_len=settings.model.max_tokens, skip_tokenizer_init=True
    ).create_model_config()
    num_heads = -(-model.get_total_num_kv_heads() // settings.actors.tensor_parallel)
    width: int = num_heads * model.get_head_size() * model.get_total_num_hidden_layers()
    return 2 * dtype.itemsize * width * settings.model.max_tokens


def engine_name() -> str:
    """vLLM's version and its kind of device, for people."""
    return f"vllm {vllm.__version__} {current_platform.device_type}"


def sampling_params(generate: Generate, *, stop_token_ids: list[int], num_candidates: int) -> SamplingParams:
    """vLLM's parameters for one request, with `num_candidates` for each sampled token."""
    sampling = generate.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=generate.seed,
        max_tokens=generate.num_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=num_candidates,  # in addition to the sampled token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe_params() -> SamplingParams:
    """vLLM's parameters for a request that scores its prompt."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,  # of the prompt's own tokens only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """The log-probability of each token of the prompt but the first, at temperature 1."""
    return list(output.prompt_logprobs.logprobs)


def over(output: RequestOutput, *, num_candidates: int, vocab_size: int) -> Ended | Failed:
    """Translate a finished output, which has `num_candidates` for each token."""
    call, ended = int(output.request_id), output.outputs[0]
    if ended.finish_reason not in ("stop", "length"):
        return Failed(call=call, why=f"vLLM ended a generation with {ended.finish_reason!r}")
    width = 1 + num_candidates  # the sampled token comes first, and again among the candidates
    kept = None
    if num_candidates:
        try:
            kept = kept_of_candidates(
                np.array(ended.logprobs.token_ids, dtype=np.int32).reshape(-1, width)[:, 1:],
                np.array(ended.logprobs.logprobs, dtype=np.float32).reshape(-1, width)[:, 1:],
                vocab_size=vocab_size,
            )
        except CandidatesCut as error:
            return Failed(call=call, why=str(error))
    completion = Completion(
        tokens=list(ended.token_ids),
        logprobs=list(ended.logprobs.logprobs[::width]),
        kept=kept,
        version_spans=[
            VersionSpan(start=span.start, stop=span.end, policy_version=int(span.version))
            for span in ended.weight_versions
        ],
        finish_reason=ended.finish_reason,
    )
    return Ended(call=call, completion=completion)


def stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a turn of the model in this folder.

    Raises ValueError if the tokenizer has no such token: every generation would run to its limit.
    """
    found = end_tokens(load_tokenizer(model_path))
    if not found:
        raise ValueError(f"`model.path` {model_path} names no end-of-turn token; set eos_token in its tokenizer")
    return sorted(found)
