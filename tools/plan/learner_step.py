"""Steps of the learner on a fake GPU: `python -m slipstream.tools.plan.learner_step CONFIG RANKS [CONFIG RANKS ...]`.

Prints the memory of each as a line of JSON. A step runs the learner's own functions: load and shard, forward, loss,
backward, AdamW, and what a publish writes. The process is rank 0 of RANKS, which has the most to do. It does
nothing else, because the fake device cannot be removed.
"""

import sys

from slipstream.tools.plan.fake_cuda import load_backend

BACKEND = load_backend()  # before torch is imported

import dataclasses  # noqa: E402
import os  # noqa: E402
import traceback  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TypeVar  # noqa: E402

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from slipstream.common.config.config import Config, load_config  # noqa: E402
from slipstream.common.config.model_config import LoraConfig  # noqa: E402
from slipstream.common.process.config_error import ConfigError  # noqa: E402
from slipstream.common.transfer.weights import buffer_bytes  # noqa: E402
from slipstream.learner.batch.pack import Packed  # noqa: E402
from slipstream.learner.model.attention import CannotPack  # noqa: E402
from slipstream.learner.model.critic import Critic, SharedTrunk, ValueHead, ValueModel, critic_of, policy_kind  # noqa: E402
from slipstream.learner.model.folder_tensors import is_of_adapter  # noqa: E402
from slipstream.learner.model.kernel import checked_kernel, head_dim_of  # noqa: E402
from slipstream.learner.model.optimizer import begin_moments, make_optimizer, make_schedule  # noqa: E402
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, packed_skeleton, shard  # noqa: E402
from slipstream.learner.model.skeleton import fill, tensors_of  # noqa: E402
from slipstream.learner.model.states import num_attending  # noqa: E402
from slipstream.learner.publisher.published import Published  # noqa: E402
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype  # noqa: E402
from slipstream.learner.step.clock import Clock  # noqa: E402
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step  # noqa: E402
from slipstream.tools.plan.fake_device import DEVICE, FakeDevice, fake_device  # noqa: E402
from slipstream.tools.plan.full_pack import full_pack  # noqa: E402
from slipstream.tools.plan.measured_step import MeasuredStep  # noqa: E402
from slipstream.tools.run.child import EXIT_BAD_INPUT  # noqa: E402

BACKEND.register_guard()  # after it
NUM_MICRO_BATCHES = 2  # one rank keeps the gradients of all but the last apart, so more make no difference
M = TypeVar("M", bound=PackedModel)


def measure_step(config: Config, *, num_ranks: int, packed: Packed | None = None) -> MeasuredStep:
    """Run one step of the learner as rank 0 of `num_ranks`, and measure it. Raises ConfigError and CannotPack.

    Its micro-batches are as full as `learner.micro_batch_tokens` allows, or `packed`.
    """
    resolve_dtype(config.model, DEVICE)
    with fake_device(num_ranks=num_ranks, context_ranks=config.learner.context_ranks) as fake:
        packs = [packed or full_pack(config, fake.ranks.context)] * NUM_MICRO_BATCHES
        skeletons = _skeletons(config, fake.ranks)
        with fake.used():
            return _measured(skeletons, packs, config=config, fake=fake)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skeletons:
    """The models of a step without their weights."""

    policy: PackedModel
    critic: ValueModel | None  # with a trunk of its own
    reference: PackedModel | None


def _skeletons(config: Config, ranks: Ranks) -> _Skeletons:
    make = partial(packed_skeleton, folder=Path(config.model.path), ranks=ranks)
    settings = ModelSettings.of(config)
    own_critic = config.objective.critic == "own"
    return _Skeletons(
        policy=make(policy_kind(config.objective), settings=settings),
        critic=make(ValueModel, settings=dataclasses.replace(settings, lora=LoraConfig())) if own_critic else None,
        reference=make(PackedModel, settings=settings.frozen()) if config.objective.kl_coefficient else None,
    )


def _measured(skeletons: _Skeletons, packs: list[Packed], *, config: Config, fake: FakeDevice) -> MeasuredStep:
    device, ranks = fake.memory, fake.ranks
    model = _loaded(skeletons.policy, ranks)
    kernel = checked_kernel(model.causal_lm, ranks.device, config.model.dtype)
    weights, loading = device.now["cuda"], device.peak.copy()
    optimizer = make_optimizer(model.causal_lm, config=config.optim)
    begin_moments(optimizer)
    moments = device.now["cuda"] + device.now["cpu"]
    offloaded = device.now["cpu"]
    models = StepModels(
        policy=model,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=config.optim, num_steps=config.learner.steps),
        critic=_critic(config, skeletons, ranks),
        reference=_loaded(skeletons.reference, ranks).requires_grad_(False) if skeletons.reference else None,
    )
    others = device.now["cuda"] + device.now["cpu"] - moments
    device.begin_peak()
    fake.waits.places.clear()
    _step(models, packs, config=config, fake=fake)
    waits, step_peak = dict(fake.waits.places), device.peak["cuda"]
    device.begin_peak()
    published = Published(model, dtype=config.model.dtype, hosts=config.learner.hosts)
    written = {_place(tensor) for _, tensor in published.tensors()}
    config_of_text = model.causal_lm.config.get_text_config()
    kv_heads = getattr(config_of_text, "num_key_value_heads", None) or config_of_text.num_attention_heads
    attending = num_attending(model.causal_lm)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return MeasuredStep(
        num_parameters=sum(parameter.numel() for parameter in model.causal_lm.parameters()),
        num_base_parameters=sum(
            parameter.numel() for name, parameter in model.causal_lm.named_parameters() if not is_of_adapter(name)
        ),
        num_kv_heads=kv_heads,
        kv_token_bytes=2 * 2 * attending * kv_heads * head_dim_of(model.causal_lm),
        num_attending=attending,
        num_layers=config_of_text.num_hidden_layers,
        attention=kernel,
        dtypes=_dtypes(model, optimizer) | {"published": sorted(written)},
        weights_bytes=weights,
        loading_peak_bytes=loading["cuda"],
        loading_host_bytes=loading["cpu"],
        trained_bytes=sum(4 * parameter.to_local().numel() for parameter in trained if isinstance(parameter, DTensor)),
        offloaded_bytes=offloaded,
        other_models_bytes=others,
        step_peak_bytes=step_peak,
        publish_peak_bytes=device.peak["cuda"],
        published_bytes=buffer_bytes(published.layout),
        waits=waits,
    )


def _step(models: StepModels, packs: list[Packed], *, config: Config, fake: FakeDevice) -> None:
    """One optimizer step whose every token but the first of each sequence is trained."""
    num_loss_tokens = sum(len(packed.loss_positions) for packed in packs) * fake.ranks.num_packing
    metrics = train_step(
        models,
        StepBatch(micro_batches=packs, num_loss_tokens=num_loss_tokens, num_trajectories=len(packs[0].lengths)),
        settings=StepSettings(
            objective=config.objective, max_lag=config.replay.max_lag, max_grad_norm=config.optim.max_grad_norm
        ),
        ranks=fake.ranks,
        clock=Clock(fake.ranks.device),
    )
    if metrics.skipped:
        raise AssertionError("the step was skipped: the optimizer was not measured")


def _loaded(model: M, ranks: Ranks) -> M:
    """What `load_kind` does with a skeleton, with weights of no value in place of those in the folder."""
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors_of(model.causal_lm).items()}
    for head in (module for module in model.children() if module is not model.causal_lm):
        for name, parameter in head.named_parameters():  # it has values: they would be on no fake device
            setattr(head, name, nn.Parameter(torch.empty(parameter.shape, device=ranks.device)))
    model.shares_prefixes = not model.carries_state  # as on any GPU where PyTorch's flash attention runs
    shard(model, ranks=ranks)
    fill(model.causal_lm, tensors, ranks=ranks, cpu_offload=model.settings.cpu_offload)
    return model


def _critic(config: Config, skeletons: _Skeletons, ranks: Ranks) -> Critic | None:
    if skeletons.critic is not None:
        module: ValueModel | ValueHead = _loaded(skeletons.critic, ranks)
    elif isinstance(skeletons.policy, SharedTrunk):
        module = skeletons.policy.value_head
    else:
        return None
    critic = critic_of(module, optim=config.optim, num_steps=config.learner.steps)
    begin_moments(critic.optimizer)
    return critic


def _dtypes(model: PackedModel, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    """The dtypes and devices of what stays in memory between steps."""
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    found = {"weights": list(model.parameters()), "moments": moments}
    return {name: sorted(set(map(_place, tensors))) for name, tensors in found.items()}


def _place(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device.type}"


def main() -> None:
    try:
        for path, num_ranks in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            measured = measure_step(load_config(path, []), num_ranks=int(num_ranks))
            print(msgspec.json.encode(measured).decode(), flush=True)
    except (ConfigError, CannotPack) as error:
        print(error, file=sys.stderr)
        _leave(EXIT_BAD_INPUT)
    except Exception:  # what is wrong with a device or a dtype, for the person who reads the log
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End at once: autograd's threads for the fake device would abort an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
