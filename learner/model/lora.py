"""LoRA: low-rank adapters for frozen linear layers, with peft. https://arxiv.org/abs/2106.09685

    y = W x + (alpha / rank) B A x        A: [rank, in], random at first;  B: [out, rank], 0 at first

The exported weights are merged. Only adapters are published; actors merge them into their own copy of the weights by
the same operation (`actors/weights/staged_weights.py`):

    W + (alpha / rank) B A
"""

from dataclasses import dataclass

import peft
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.model.folder_tensors import stored_in_parts, stored_names
from slipstream.learner.model.skeleton import unused_parameters

_NAME = "default"  # peft supports several named adapters; this is its default name for a single one


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter of one weight, in the order of its dimensions: A and B, or B and A transposed for a Conv1D."""

    down: Tensor  # A
    up: Tensor  # B
    scaling: float  # alpha / rank

    def merged(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight that has the same effect as `weight` with its adapter.

        With weight 1, A 2, B 3 and a scaling of 0.5 it is 4.
        """
        return torch.addmm(weight, self.up.detach(), self.down.detach(), alpha=self.scaling)


def add_adapters(causal_lm: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze every weight of `causal_lm`, and add an adapter to each layer that can have one.

    A is random, but the random state is restored afterwards.
    """
    # No dropout: the log-probabilities would differ from those of the actors.
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=_targets(causal_lm),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in causal_lm.modules()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=causal_lm.config.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(settings, causal_lm, adapter_name=_NAME)


@torch.no_grad()
def check_merged(causal_lm: PreTrainedModel) -> None:
    """Raise ConfigError unless one adapted layer of each name and shape computes the same with merged weights."""
    generator, adapters = torch.Generator().manual_seed(0), adapters_of(causal_lm)
    kinds = {(name.rpartition(".")[2], module.base_layer.weight.shape): name for name, module in _adapted(causal_lm)}
    for name in kinds.values():
        module = causal_lm.get_submodule(name)
        up, inputs = module.lora_B[_NAME].weight, torch.randn(2, module.in_features, generator=generator)
        up.normal_(generator=generator)
        found, merged = module(inputs), adapters[f"{name}.weight"].merged(module.base_layer.weight)
        up.zero_()
        expected = torch.func.functional_call(module.base_layer, {"weight": merged}, (inputs,))
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= 1e-3:
            raise ConfigError(
                f"`model.lora.rank` must be 0 for this model: {name} differs from its merged weights by "
                f"{difference:.3g}"
            )


def adapters_of(causal_lm: PreTrainedModel) -> dict[str, Adapter]:
    """The adapters, by the Hugging Face name of the weight that each belongs to; empty without LoRA."""
    adapters = dict[str, Adapter]()
    for name, module in _adapted(causal_lm):
        down, up = module.lora_A[_NAME].weight, module.lora_B[_NAME].weight
        if module.fan_in_fan_out:  # the weight of a Conv1D is [in, out]
            down, up = up.T, down.T
        adapters[f"{name}.weight"] = Adapter(down=down, up=up, scaling=module.scaling[_NAME])
    return adapters


def name_in_peft(name: str) -> str:
    """The name of an adapter's parameter in the files that peft writes."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def adapter_settings(causal_lm: PreTrainedModel) -> peft.LoraConfig:
    """The peft configuration, which peft needs to load the adapters again."""
    return causal_lm.peft_config[_NAME]


def _targets(causal_lm: PreTrainedModel) -> list[str]:
    """The names of the layers that get an adapter.

    Not the head, nor layers with a name of an expert's part or of a router, which peft would look for among the
    experts; none that text does not pass, or whose weight the kernel of Mamba takes itself, without the adapter.
    """
    unused, stored, head = unused_parameters(causal_lm), stored_names(causal_lm), causal_lm.get_output_embeddings()
    modules = dict(causal_lm.named_modules())
    mamba = {f"{name}.out_proj" for name, module in modules.items() if {"A_log", "D"} <= module._parameters.keys()}
    experts = {end for name in stored_in_parts(causal_lm) for end in (name.split(".")[-2], "gate")}
    return [
        name
        for name, module in modules.items()
        if type(module) in (nn.Linear, Conv1D) and module is not head and name not in mamba
        if (weight := f"{name}.weight") not in unused and stored.get(weight) is not None
        if name.rpartition(".")[2] not in experts
    ]


def _adapted(causal_lm: PreTrainedModel) -> list[tuple[str, peft.tuners.lora.LoraLayer]]:
    return [
        (name, module) for name, module in causal_lm.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    ]
