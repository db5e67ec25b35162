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

from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.model.folder_tensors import stored_in_parts
from slipstream.learner.model.skeleton import unused_parameters

_NAME = "default"  # peft supports several named adapters; this is its default name for a single one


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapter of one weight."""

    down: nn.Parameter  # A
    up: nn.Parameter  # B
    scaling: float  # alpha / rank

    def merged(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight that has the same effect as `weight` with its adapter.

        With weight 1, A 2, B 3 and a scaling of 0.5 it is 4.
        """
        return torch.addmm(weight, self.up.detach(), self.down.detach(), alpha=self.scaling)


def add_adapters(causal_lm: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze every weight of `causal_lm`, and add an adapter to each target module of `config`.

    A is random, but the random state is restored afterwards. Raises ConfigError for target modules that the model does
    not have, or that are not linear layers of its decoder.
    """
    targets, excluded = config.target_modules or _linear_layers(causal_lm), _reading_images(causal_lm)
    if not config.target_modules:
        excluded += _fused_outputs(causal_lm)
    # No dropout: the log-probabilities would differ from those of the actors.
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=causal_lm.config.name_or_path,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            peft.inject_adapter_in_model(settings, causal_lm, adapter_name=_NAME)
    except ValueError as error:
        raise _bad_targets(config, " ".join(str(error).split())) from error
    heads = {id(causal_lm.get_input_embeddings()), id(causal_lm.get_output_embeddings())}
    for name, module in _adapted(causal_lm):
        if type(module) is not peft.tuners.lora.Linear or id(module) in heads:
            raise _bad_targets(config, f"{name} is not a linear layer of the decoder")


def adapters_of(causal_lm: PreTrainedModel) -> dict[str, Adapter]:
    """The adapters, by the Hugging Face name of the weight that each belongs to; empty without LoRA."""
    return {
        f"{name}.weight": Adapter(
            down=module.lora_A[_NAME].weight, up=module.lora_B[_NAME].weight, scaling=module.scaling[_NAME]
        )
        for name, module in _adapted(causal_lm)
    }


def name_in_peft(name: str) -> str:
    """The name of an adapter's parameter in the files that peft writes."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def adapter_settings(causal_lm: PreTrainedModel) -> peft.LoraConfig:
    """The peft configuration, which peft needs to load the adapters again."""
    return causal_lm.peft_config[_NAME]


def _linear_layers(causal_lm: PreTrainedModel) -> list[str] | str:
    """What gets an adapter if nothing is named: every linear layer but the head.

    In a mixture of experts, layers that are named like those of an expert get none: peft would adapt the experts too,
    which transformers keeps as one tensor.
    """
    experts = {name.split(".")[-2] for name in stored_in_parts(causal_lm)}
    if not experts:
        return "all-linear"
    head = causal_lm.get_output_embeddings()
    linear = [name for name, module in causal_lm.named_modules() if type(module) is nn.Linear and module is not head]
    return sorted({name.rpartition(".")[2] for name in linear} - experts)


def _reading_images(causal_lm: PreTrainedModel) -> list[str]:
    """The names of the linear layers that no text passes through: an adapter there would never learn."""
    unused = unused_parameters(causal_lm)
    return [name for name, _ in causal_lm.named_modules() if f"{name}.weight" in unused]


def _fused_outputs(causal_lm: PreTrainedModel) -> list[str]:
    """The names of the output layers of Mamba: on a GPU its kernel takes their weight itself, and misses an adapter."""
    parameters = {"A_log", "D"}  # only layers of Mamba have both
    return [f"{name}.out_proj" for name, module in causal_lm.named_modules() if parameters <= module._parameters.keys()]


def _adapted(causal_lm: PreTrainedModel) -> list[tuple[str, peft.tuners.lora.LoraLayer]]:
    return [
        (name, module) for name, module in causal_lm.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    ]


def _bad_targets(config: LoraConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"`model.lora.target_modules` {config.target_modules}: {reason}; "
        "leave it empty to adapt every linear layer but the head"
    )
