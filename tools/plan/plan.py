"""`slipstream plan`: the memory that a run needs on GPUs and hosts, before there are any."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from slipstream.actors.engine.shadow_memory import ENGINE_RESERVE_BYTES, GIB
from slipstream.common.config.config import Config, dump_config
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.rewards.part import reward_parts
from slipstream.learner.publisher.messages import NUM_SLOTS
from slipstream.tools.plan.fake_cuda import checked_compiler
from slipstream.tools.plan.measured_step import MeasuredStep
from slipstream.tools.plan.memory import (
    LEARNER_RESERVE_BYTES,
    EngineMemory,
    engine_memory,
    gib,
    kv_beside_learner,
    learner_memory,
    problems,
)
from slipstream.tools.plan.plan_options import GPUS, PlanOptions
from slipstream.tools.run.check_input import check_model_config
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.devices import split_devices
from slipstream.tools.terminal.table import print_table

STEP_TIMEOUT_S = 900.0
NOTICE = "Higher priority item already registered"  # of a torch for CUDA, beside which the fake device is loaded


def plan(config: Config, options: PlanOptions) -> int:
    """Print the memory of learner, actors and host; return 0 if all of it fits. Raises ConfigError."""
    reward_parts(config.env.entries())
    if not config.model.path:
        print("`model.path` is empty: a tiny model fits on any GPU, and on none")
        return 0
    split = None if options.actor_gpus else split_devices(config, [str(gpu) for gpu in range(options.gpus)])
    _check_hosts(config, options)
    check_model_config(Path(config.model.path))
    step, gpu_bytes = measure(config), GPUS[options.gpu] * GIB
    print_table(f"Learner: {config.learner.ranks} ranks, on each GPU of {gib(gpu_bytes)}", _learner_rows(config, step))
    beside_bytes = learner_memory(step) if split and split.shared else 0
    if beside_bytes and not config.actors.limits_memory:
        config.actors.kv_cache_bytes = kv_beside_learner(config, step, gpu_bytes=gpu_bytes)  # as `up` chooses it
    engine = engine_memory(config, step, gpu_bytes=gpu_bytes, beside_bytes=beside_bytes)
    print_table("Actors: on each GPU of an engine", _engine_rows(config, engine, gpu_bytes=gpu_bytes))
    print_table("Host of the learner", host_rows(config, step))
    if split:
        print_table("GPUs", {"split": str(split)})
    found = problems(config, step, split, gpu_bytes=gpu_bytes)
    for problem in found:
        print(f"DOES NOT FIT: {problem}")
    if not found:
        print("It fits, by these numbers. Reserves are estimates; begin with learner.steps=5, and watch the memory.")
    return 1 if found else 0


def measure(config: Config) -> MeasuredStep:
    """Run one step of the learner of `config` on a fake GPU, in a process of its own. Raises ConfigError."""
    checked_compiler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        arguments = [str(path), str(config.learner.ranks)]
        command = [sys.executable, "-P", "-m", "slipstream.tools.plan.learner_step", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, env=environment)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the step on a fake GPU for `model.path` {config.model.path} has taken longer than "
                f"{STEP_TIMEOUT_S:.0f} s; end other programs on this machine, or lower `learner.micro_batch_tokens`"
            ) from None
    why = "\n".join(line for line in done.stderr.strip().splitlines() if not line.startswith(NOTICE))
    if done.returncode == EXIT_BAD_INPUT:
        raise ConfigError(why)
    if done.returncode:
        raise ConfigError(
            f"the step on a fake GPU failed for `model.path` {config.model.path}:\n{why[-2000:]}\n"
            "the model cannot be planned with these versions of torch and transformers"
        )
    return msgspec.json.decode(done.stdout, type=MeasuredStep)


def _check_hosts(config: Config, options: PlanOptions) -> None:
    """Raise ConfigError if the learner's host, or a host of actors, has too few GPUs."""
    learner, actors = config.learner, config.actors
    if learner.ranks_per_host > options.gpus:
        raise ConfigError(
            f"`learner.ranks` must be <= --gpus = {options.gpus} for each of {learner.hosts} `learner.hosts`, got "
            f"{learner.ranks}; lower it, or add GPUs"
        )
    if 0 < options.actor_gpus < actors.count * actors.tensor_parallel:
        raise ConfigError(
            f"--actor-gpus must be >= actors.count * actors.tensor_parallel = {actors.count * actors.tensor_parallel}, "
            f"got {options.actor_gpus}; lower `actors.count`, or add GPUs"
        )


def _learner_rows(config: Config, step: MeasuredStep) -> dict[str, str]:
    kept = step.weights_bytes + 2 * step.trained_bytes + step.other_models_bytes
    tokens = -(-config.learner.micro_batch_tokens // config.learner.context_ranks)
    rows = {
        "parameters": f"{step.num_parameters / 1e9:.2f} billion",
        "attention": step.attention,
        "weights, float32": gib(step.weights_bytes),
        "AdamW's moments": gib(2 * step.trained_bytes),
        "gradient": gib(step.trained_bytes),
        "critic, reference": gib(step.other_models_bytes),
        f"the rest at the peak: activations of {tokens} tokens, logits, gathered layers": gib(
            max(0, step.step_peak_bytes - kept - step.trained_bytes)
        ),
        "peak of a step": gib(step.step_peak_bytes),
        "peak while loading": gib(step.loading_peak_bytes),
        "peak of a publish": gib(step.publish_peak_bytes),
        "reserve (estimate)": gib(LEARNER_RESERVE_BYTES),
    }
    if not step.other_models_bytes:
        del rows["critic, reference"]
    if config.learner.cpu_offload:
        for name in ("weights, float32", "AdamW's moments", "gradient"):
            rows[name] = "in host memory"
    return rows


def _engine_rows(config: Config, engine: EngineMemory, *, gpu_bytes: int) -> dict[str, str]:
    wanted, longest = config.actors.max_episodes, config.model.max_tokens
    at_once = engine.num_tokens // longest
    no_room = "no room: new weights are loaded while nothing is generated"
    return {
        "weights, bfloat16": gib(engine.weights_bytes),
        "shadow model, into which new weights are loaded": gib(engine.shadow_bytes) if engine.shadow_bytes else no_room,
        "reserve (estimate)": gib(ENGINE_RESERVE_BYTES),
        "KV cache": f"{gib(max(0, engine.kv_bytes))}, {engine.num_tokens} tokens of {engine.kv_token_bytes} bytes",
        f"episodes of {longest} tokens that fit": f"{at_once}; actors.max_episodes is {wanted}"
        + ("" if at_once >= wanted else ", which fit if they are shorter; else vLLM preempts some"),
        "memory of the GPU": f"{gib(engine.taken_bytes)} of {gib(gpu_bytes)}",
    }


def host_rows(config: Config, step: MeasuredStep) -> dict[str, str]:
    """The memory of the learner's host; with several `learner.hosts`, of the one with rank 0."""
    ranks = config.learner.ranks_per_host
    publishing, checkpoint = NUM_SLOTS * step.published_bytes, 3 * step.trained_bytes * ranks
    offloaded = step.offloaded_bytes * ranks
    return {
        "loading (rank 0 reads the folder)": gib(step.loading_host_bytes),
        "publishing": gib(publishing),
        "a checkpoint that is being written, its ranks": gib(checkpoint),
        "offloaded, its ranks": gib(offloaded),
        "at the peak": gib(offloaded + max(step.loading_host_bytes, publishing + checkpoint)),
        "bytes of a publish": f"{gib(step.published_bytes)} to an actor without the version before; else a delta",
    }
