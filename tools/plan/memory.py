"""What a run needs of GPUs and hosts, from a step on a fake GPU; what does not fit, and what to change.

The learner's numbers are measured on the fake GPU. An engine's are computed: its weights, split evenly over its GPUs,
a shadow model by the rule of the engine itself, and the keys and values of full attention in every layer that attends;
what other layers keep of a sequence is left out. RESERVES are estimates.
"""

from dataclasses import dataclass

from slipstream.actors.engine.shadow_memory import (
    ENGINE_RESERVE_BYTES,
    GIB,
    SHADOW_WORK_BYTES,
    needed_bytes,
    room_for_shadow,
)
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.plan.measured_step import MeasuredStep
from slipstream.tools.run.devices import Split

LEARNER_RESERVE_BYTES = 4 * GIB  # estimate: CUDA's context, NCCL's buffers, and what the allocator cannot use
ENGINE_DTYPE_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """One engine, in bytes on each of its GPUs."""

    weights_bytes: int
    shadow_bytes: int  # for new weights beside them; 0 if there is no room: they are loaded while nothing is generated
    kv_token_bytes: int  # of one token
    kv_bytes: int  # for all keys and values; negative if the weights alone are too large
    taken_bytes: int  # of the GPU, all together

    @property
    def num_tokens(self) -> int:
        """The tokens whose keys and values fit."""
        return max(0, self.kv_bytes) // self.kv_token_bytes


def engine_memory(config: Config, step: MeasuredStep, *, gpu_bytes: int, beside_bytes: int = 0) -> EngineMemory:
    """The memory of an engine with GPUs of `gpu_bytes`, of which another process has `beside_bytes`."""
    actors, together = config.actors, config.actors.tensor_parallel
    base_bytes = ENGINE_DTYPE_BYTES * step.num_base_parameters
    weights = -(-base_bytes // together)
    kv_heads = -(-step.num_kv_heads // together)  # at least one on each GPU
    kv_token = step.kv_token_bytes * kv_heads // step.num_kv_heads
    if actors.kv_cache_bytes:
        kv = actors.kv_cache_bytes
        free = gpu_bytes - beside_bytes - weights - kv - ENGINE_RESERVE_BYTES
        fits = needed_bytes(weights, room_bytes=0, total_bytes=gpu_bytes) <= free
        shadow = weights + SHADOW_WORK_BYTES if fits else 0
    else:
        share = int(actors.gpu_memory_utilization * gpu_bytes)
        # An engine counts as if every layer attended: vLLM does not say of every hybrid how many do.
        episode = kv_token * step.num_layers // step.num_attending * config.model.max_tokens
        shadow = room_for_shadow(share_bytes=share, weights_bytes=weights, episode_bytes=episode)
        kv = share - weights - shadow - ENGINE_RESERVE_BYTES
    taken = weights + shadow + max(0, kv) + ENGINE_RESERVE_BYTES
    return EngineMemory(
        weights_bytes=weights, shadow_bytes=shadow, kv_token_bytes=kv_token, kv_bytes=kv, taken_bytes=taken
    )


def kv_beside_learner(config: Config, step: MeasuredStep, *, gpu_bytes: int) -> int:
    """The bytes for keys and values of an engine that shares GPUs of `gpu_bytes` with the learner.

    As many as all its episodes can use at their longest, if there are so many; a shadow model comes before that,
    if an episode fits beside it. Raises ConfigError if no episode fits.
    """
    engine = engine_memory(config, step, gpu_bytes=gpu_bytes)
    episode = engine.kv_token_bytes * step.num_layers // step.num_attending * config.model.max_tokens
    left = gpu_bytes - learner_memory(step) - engine.weights_bytes - ENGINE_RESERVE_BYTES
    beside_shadow = left - needed_bytes(engine.weights_bytes, room_bytes=0, total_bytes=gpu_bytes)
    room = min(beside_shadow if beside_shadow >= episode else left, config.actors.max_episodes * episode)
    if room < episode:
        raise ConfigError(
            f"learner and actor do not fit on one GPU of {gib(gpu_bytes)}: the learner needs "
            f"{gib(learner_memory(step))}, the engine's weights {gib(engine.weights_bytes)}, its reserve "
            f"{gib(ENGINE_RESERVE_BYTES)}, and the keys and values of an episode of model.max_tokens="
            f"{config.model.max_tokens} {gib(episode)}; {_smaller_learner(config)}; or give them GPUs of their own"
        )
    return room


def learner_memory(step: MeasuredStep) -> int:
    """The bytes that a rank of the learner takes of its GPU."""
    return max(step.step_peak_bytes, step.loading_peak_bytes) + LEARNER_RESERVE_BYTES


def problems(config: Config, step: MeasuredStep, split: Split | None, *, gpu_bytes: int) -> list[str]:
    """What does not fit, each with what to change; `split` is None if the actors have hosts of their own."""
    learner_bytes = learner_memory(step)
    beside = learner_bytes if split and split.shared else 0
    engine = engine_memory(config, step, gpu_bytes=gpu_bytes, beside_bytes=beside)
    found = []
    if learner_bytes > gpu_bytes:
        found.append(
            f"a rank of the learner needs {gib(learner_bytes)} of {gib(gpu_bytes)}: {_smaller_learner(config)}"
        )
    elif split and split.shared and learner_bytes + engine.taken_bytes > gpu_bytes:
        left = gpu_bytes - learner_bytes - engine.weights_bytes - ENGINE_RESERVE_BYTES
        advice = (
            f"set actors.kv_cache_bytes={left // GIB * GIB}" if left >= GIB else "give them different GPUs, or one more"
        )
        found.append(
            f"learner and actor need {gib(learner_bytes + engine.taken_bytes)} of {gib(gpu_bytes)} on the GPU that "
            f"they share: {advice}"
        )
    if engine.num_tokens < config.model.max_tokens:
        found.append(
            f"an engine has memory for {engine.num_tokens} tokens, and one episode may have "
            f"model.max_tokens={config.model.max_tokens}: raise actors.tensor_parallel, "
            "actors.kv_cache_bytes or actors.gpu_memory_utilization, or lower model.max_tokens"
        )
    elif engine.taken_bytes > gpu_bytes:
        found.append(
            f"an engine needs {gib(engine.taken_bytes)} of {gib(gpu_bytes)}: lower actors.kv_cache_bytes, or raise "
            "actors.tensor_parallel"
        )
    if step.num_kv_heads % config.actors.tensor_parallel and config.actors.tensor_parallel % step.num_kv_heads:
        found.append(
            f"actors.tensor_parallel={config.actors.tensor_parallel} neither divides the model's {step.num_kv_heads} "
            "key-value heads nor is a multiple of them: vLLM refuses it"
        )
    return found


def _smaller_learner(config: Config) -> str:
    """What makes a rank of the learner smaller, what costs least first."""
    learner, advice = config.learner, []
    if not learner.activation_checkpointing:
        advice.append("set learner.activation_checkpointing=true")
    if learner.micro_batch_tokens > config.model.max_tokens:
        advice.append(f"lower learner.micro_batch_tokens to {config.model.max_tokens}")
    elif learner.ranks > learner.context_ranks:
        more = [ranks for ranks in range(learner.context_ranks + 1, learner.ranks + 1) if learner.ranks % ranks == 0]
        advice.append(f"divide each sequence over more ranks: learner.context_ranks={more[0]}")
    advice.append(f"raise learner.ranks above {learner.ranks}")
    if not config.model.lora.rank:
        advice.append("train adapters (model.lora.rank=16)")
    if not learner.cpu_offload:
        advice.append("set learner.cpu_offload=true")
    return "; or ".join(advice)


def gib(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
