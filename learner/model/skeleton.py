"""Loads a model so that only rank 0 ever has all of its weights; the other ranks receive their shards from it.

all make a skeleton: shapes, no memory | rank 0 reads the folder | shard it | rank 0 sends out one tensor at a time
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.tokenizer import no_own_code
from slipstream.common.transfer.model_folder import check_not_quantised
from slipstream.learner.model.attention import CannotPack
from slipstream.learner.model.states import num_attending, stateful_kinds
from slipstream.learner.ranks.ranks import Ranks, refuse_together


def vocab_size_of(folder: Path) -> int:
    """The size of the vocabulary of the model in `folder`, from its configuration. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`model.path` {folder} has no config.json; it must be a Hugging Face folder")
    try:
        with no_own_code(folder):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)
    except Exception as error:  # the code of the model's configuration may raise anything
        raise ConfigError(_reason(folder, error)) from error


def skeleton_of(folder: Path) -> PreTrainedModel:
    """The causal LM of `folder` without its weights: float32 parameters and buffers on the meta device.

    Raises ConfigError for a folder without a model, and CannotPack for an architecture that cannot read packed
    sequences.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`model.path` {folder} has no config.json; it must be a Hugging Face folder")
    check_not_quantised(folder)
    with no_own_code(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        # Every architecture supports eager attention; it is replaced after the check that it can be.
        causal_lm = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    if len(names := config.architectures or []) != 1 or not hasattr(transformers, names[0]):
        raise ConfigError(
            f"`model.path` {folder}: config.json must name one class of transformers in `architectures`, got {names}"
        )
    if causal_lm._is_stateful and not (stateful_kinds(causal_lm) and num_attending(causal_lm)):
        raise CannotPack(
            "all its layers carry a state from token to token, which would continue into the next sequence"
        )
    if not causal_lm._can_set_attn_implementation():
        raise CannotPack("its attention is its own code, and transformers cannot replace it")
    settings = causal_lm.config.get_text_config().to_dict()
    if settings.get("attention_chunk_size"):
        raise CannotPack("it attends within chunks of a sequence (attention_chunk_size)")
    if settings.get("index_topk"):
        raise CannotPack("each token attends to tokens that an index of its own chooses (index_topk)")
    _freeze_unused(causal_lm)
    return causal_lm


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class of transformers that loads a folder of `config` with all its tensors, those for images too."""
    reads_images = type(config) in AutoModelForImageTextToText._model_mapping
    kind: type[AutoModelForCausalLM | AutoModelForImageTextToText]
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    return kind


def unused_parameters(causal_lm: PreTrainedModel) -> set[str]:
    """The names of the parameters that no text passes through: those of encoders of images. Empty for most models."""
    used = {
        id(parameter)
        for module in (causal_lm.get_decoder(), causal_lm.get_output_embeddings())
        for parameter in module.parameters()
    }
    return {name for name, parameter in causal_lm.named_parameters() if id(parameter) not in used}


def _freeze_unused(causal_lm: PreTrainedModel) -> None:
    """Train a vision-language model as a language model: what reads images stays as it is, and is published so."""
    unused = unused_parameters(causal_lm)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(name not in unused)


@contextmanager
def refused_together(folder: Path, *, ranks: Ranks) -> Iterator[None]:
    """Raise ConfigError on every rank if the block raises on any, so that no rank waits for a failed one. Collective.

    The block runs the code of the model in `folder`, which is not ours, so any exception becomes a ConfigError.
    """
    cause: Exception | None = None
    try:
        yield
    except Exception as error:  # the model's code may raise anything
        cause = error
    refuse_together(_reason(folder, cause) if cause else "", ranks=ranks, cause=cause)


def _reason(folder: Path, error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    what = str(error) if isinstance(error, CannotPack) else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"`model.path` {folder} cannot be trained here: {what}; docs/models.md lists the models that can"


def tensors_of(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """Everything that a skeleton lacks: every parameter and every buffer, including those not stored in the folder."""
    return {**dict(causal_lm.named_parameters()), **dict(causal_lm.named_buffers())}


@torch.no_grad()
def fill(skeleton: PreTrainedModel, tensors: dict[str, Tensor], *, ranks: Ranks, cpu_offload: bool) -> None:
    """Allocate the sharded `skeleton` and copy `tensors`, which only rank 0 needs, into it. Collective.

    With `cpu_offload` its parameters are in host memory. Each tensor is freed once its shards are sent out, so that
    rank 0 has memory for its own shards.
    """
    skeleton.to_empty(device="cpu" if cpu_offload else ranks.device)
    for name, parameter in skeleton.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = tensors.pop(name).detach() if ranks.rank == 0 else torch.empty(parameter.shape, device=ranks.device)
        parameter.to_local().copy_(distribute_tensor(whole, ranks.mesh, parameter.placements).to_local())
    for name, empty in list(skeleton.named_buffers()):
        buffer = tensors.pop(name).to(ranks.device) if ranks.rank == 0 else empty.to(ranks.device)
        dist.broadcast(buffer, src=0)
        module, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(module), leaf, buffer)
