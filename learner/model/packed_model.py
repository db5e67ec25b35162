"""A Hugging Face causal LM that reads packed sequences: loads it from a folder, shards it, gathers its weights."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from slipstream.common.config.config import Config
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.text.tokenizer import absent_ids
from slipstream.learner.batch.pack import Packed, TokenSequence, pack
from slipstream.learner.batch.prefixes import prefixes_of
from slipstream.learner.model.attention import CannotPack
from slipstream.learner.model.context_attention import attention, check_context
from slipstream.learner.model.kernel import (
    DTYPES,
    PACKED_ATTENTION,
    attention_for,
    check_compiler,
    check_shares,
    checked_kernel,
    compile_layers,
    refuses_shared_keys,
    sequence_bounds,
)
from slipstream.learner.model.logprobs import Predictions, TokenLogprobs, chunked_logprobs, predictions
from slipstream.learner.model.lora import add_adapters, check_merged
from slipstream.learner.model.rope import fix_frequencies
from slipstream.learner.model.skeleton import auto_class, fill, refused_together, skeleton_of, tensors_of
from slipstream.learner.model.states import decoder_layers, separate_states, stateful_kinds
from slipstream.learner.ranks.ranks import Ranks

log = logging.getLogger(__name__)

M = TypeVar("M", bound="PackedModel")
LARGE_LAYER_BYTES = 8 * 2**20


def name_of(dtype: torch.dtype) -> str:
    """The name of `dtype` in manifests, such as float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """How a model is loaded, and how it computes; the model keeps them."""

    dtype: str  # of the forward pass, float32 or bfloat16; logits and heads are always float32
    temperature: float  # logits are divided by it, unless a pack says at which temperature it was sampled
    chunk_tokens: int = 1024  # tokens whose logits exist at one time
    max_tokens: int | None = None  # of the longest sequence; some models need it, see `slipstream.learner.model.rope`
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # the layers, see `slipstream.learner.model.kernel`
    cpu_offload: bool = False  # weights, gradients and optimizer state in host memory; a layer is copied when needed
    lora: LoraConfig = field(default_factory=LoraConfig)  # with a rank above 0 only adapters are trained

    @classmethod
    def of(cls, config: Config) -> "ModelSettings":
        """The settings of a run's policy."""
        return cls(
            dtype=config.model.dtype,
            temperature=config.sampling.temperature,
            max_tokens=config.model.max_tokens,
            activation_checkpointing=config.learner.activation_checkpointing,
            compile=config.learner.compile,
            cpu_offload=config.learner.cpu_offload,
            lora=config.model.lora,
        )

    def frozen(self) -> "ModelSettings":
        """The same for a model that is not trained."""
        return ModelSettings(
            dtype=self.dtype, temperature=self.temperature, chunk_tokens=self.chunk_tokens, max_tokens=self.max_tokens
        )


class PackedModel(nn.Module):
    """A causal LM whose forward pass takes a pack and returns the log-probabilities of its loss tokens."""

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path, settings: ModelSettings) -> None:
        super().__init__()
        self.causal_lm: PreTrainedModel = causal_lm
        self.folder = folder  # that it was loaded from
        self.settings = settings
        self.absent: Tensor | None = None  # ids that its tokenizer lacks: their probability is 0
        # from token to token: see `slipstream.learner.model.states`
        self.carries_state = bool(stateful_kinds(causal_lm))
        self.context_ranks = 1  # that compute each micro-batch together: see `slipstream.learner.ranks.context`
        self.shares_prefixes = False  # whether it takes packs whose shared prefixes are computed once
        self.one_rank_holds_all = False  # one rank, without offloading: see `expect_backward`
        self.syncs_gradients = True  # FSDP takes the gradients after the next backward pass

    @property
    def vocab_size(self) -> int:
        return int(self.causal_lm.config.get_text_config().vocab_size)

    @property
    def logits_divisor(self) -> float:
        """What the model itself divides its logits by (Granite), or multiplies them by (Cohere); 1 for most models."""
        config = self.causal_lm.config.get_text_config()
        divisor, factor = (getattr(config, name, None) or 1.0 for name in ("logits_scaling", "logit_scale"))
        return float(divisor / factor)

    def heads(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters outside the causal LM that are trained and saved with it."""
        return iter(())

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Within the block, forward passes use this temperature instead of that of the settings.

        A pack that has its own keeps it.
        """
        settings = self.settings
        self.settings = dataclasses.replace(settings, temperature=temperature)
        try:
            yield
        finally:
            self.settings = settings

    def forward(self, packed: Packed, *, entropy_gradient: bool = False) -> TokenLogprobs:
        """The log-probabilities of the loss tokens, computed in chunks: see `chunked_logprobs`."""
        found = predictions(self.hidden_states(packed), packed)
        return self.logprobs(found, packed, entropy_gradient=entropy_gradient)

    def hidden_states(self, packed: Packed) -> Float[Tensor, "computed hidden"]:
        """The decoder's last hidden state of every token of the pack that this rank computes: see `Packed`."""
        tokens, position_ids = packed.tokens, packed.position_ids
        if packed.prefixes and not self.shares_prefixes:
            raise ValueError(f"{type(self.causal_lm).__name__} cannot share prefixes: pack without share_prefixes")
        if self.context_ranks > 1 and packed.share is None and torch.is_grad_enabled():
            raise ValueError("every rank of a context would train every token of this pack: pack it with the context")
        if (computed := packed.computed) is not None:
            tokens, position_ids = tokens[computed], position_ids[computed]
        # No mask and no cache: with either, transformers would treat the row as one sequence.
        hidden: Tensor = self.causal_lm.get_decoder()(
            input_ids=tokens[None],
            position_ids=position_ids[None],
            attention_mask=None,
            use_cache=False,
            **sequence_bounds(packed),
        ).last_hidden_state[0]
        return hidden

    def logprobs(self, found: Predictions, packed: Packed, *, entropy_gradient: bool) -> TokenLogprobs:
        """The log-probability of each loss token of `packed`, from the output embedding and the states in `found`."""
        head, of = self.causal_lm.get_output_embeddings(), found.of
        temperature = self.settings.temperature if packed.temperature is None else packed.temperature
        if isinstance(temperature, Tensor):
            temperature = of.among_own(temperature)
        own = chunked_logprobs(
            found.states,
            head.weight,
            head.bias,
            found.targets,
            kept=None if packed.kept is None else of.among_own(packed.kept),
            has_kept=None if packed.has_kept is None else of.among_own(packed.has_kept),
            absent=self.absent,
            temperature=temperature * self.logits_divisor,
            chunk_tokens=self.settings.chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        return TokenLogprobs(logprobs=of.of_all_ranks(own.logprobs), entropies=of.of_all_ranks(own.entropies))


def load_model(path: str | Path, *, ranks: Ranks, settings: ModelSettings) -> PackedModel:
    """Load the policy in folder `path`: see `load_kind`."""
    return load_kind(PackedModel, path, ranks=ranks, settings=settings)


def load_kind(kind: type[M], path: str | Path, *, ranks: Ranks, settings: ModelSettings) -> M:
    """Load the causal LM in folder `path` with float32 master weights, and shard it over `ranks`.

    `kind` is the class of the result: see `slipstream.learner.model.critic`. Every rank calls it. Raises
    ConfigError, on every rank, for a folder without a causal LM, for a model that gives other results for packed
    sequences, and if the layers cannot be compiled.
    """
    folder = Path(path)
    transformers_logging.disable_progress_bar()
    with refused_together(folder, ranks=ranks):
        if settings.compile:
            check_compiler(ranks.device)
        model = packed_skeleton(kind, folder, ranks=ranks, settings=settings)
        kernel = checked_kernel(model.causal_lm, ranks.device, settings.dtype)
        refused = refuses_shared_keys(model.causal_lm, ranks.device, settings.dtype)
        tensors: dict[str, Tensor] = {}
        if ranks.rank == 0:
            tensors, refused_by_model = _read(folder, settings)
            refused = refused or refused_by_model
    model.shares_prefixes = not ranks.any(bool(refused))
    if ranks.rank == 0:
        log.info("attention in %s on %s: %s", settings.dtype, ranks.device.type, kernel)
        if not model.shares_prefixes:
            log.info("prefixes that sequences share are computed for each: %s", refused or "another rank cannot")
    shard(model, ranks=ranks)
    fill(model.causal_lm, tensors, ranks=ranks, cpu_offload=settings.cpu_offload)
    if ranks.context:
        check_context(
            model, model.causal_lm.get_decoder(), vocab_size=model.vocab_size, dtype=settings.dtype, ranks=ranks
        )
    if absent := absent_ids(folder, model.vocab_size):
        model.absent = torch.tensor(absent, device=ranks.device)
    return model


def packed_skeleton(kind: type[M], folder: Path, *, ranks: Ranks, settings: ModelSettings) -> M:
    """The model of `folder` without its weights, for `ranks`. Raises ConfigError and CannotPack: see `skeleton_of`."""
    AttentionInterface.register(PACKED_ATTENTION, attention)
    causal_lm = skeleton_of(folder)
    fix_frequencies(causal_lm, max_tokens=settings.max_tokens)
    separate_states(causal_lm)
    context_ranks = ranks.context.num_ranks if ranks.context else 1
    check_shares(causal_lm, context_ranks)
    causal_lm.set_attn_implementation(
        PACKED_ATTENTION if ranks.context else attention_for(causal_lm, ranks.device, settings.dtype)
    )
    if settings.lora.rank:
        add_adapters(causal_lm, settings.lora)
    # Always in evaluation mode: with dropout, the log-probabilities would differ from those of the actors.
    model = kind(causal_lm, folder=folder, settings=settings).eval()
    model.context_ranks = context_ranks
    return model


def shard(model: PackedModel, *, ranks: Ranks) -> None:
    """Let each of `ranks` have a part of every parameter: compiles, checkpoints and shards as the settings say."""
    causal_lm, settings = model.causal_lm, model.settings
    layers = decoder_layers(causal_lm)
    if settings.compile:  # before activation checkpointing and FSDP, so that they wrap the compiled code
        compile_layers(layers)
    if settings.activation_checkpointing:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    # A single rank has every weight anyway: freeing a gathered copy after each layer would only cost time.
    model.one_rank_holds_all = ranks.num_ranks == 1 and not settings.cpu_offload
    on_one_cpu = model.one_rank_holds_all and ranks.device.type == "cpu"
    heads = [module for module in model.children() if module is not causal_lm]
    # FSDP copies the weights and gradients of a group at once: small layers are no groups where nothing is sent.
    groups = [layer for layer in layers if not on_one_cpu or _num_bytes(layer) >= LARGE_LAYER_BYTES]
    for module in [*groups, *heads, model]:
        fully_shard(
            module,
            mesh=ranks.mesh,
            mp_policy=MixedPrecisionPolicy() if module in heads else policy,
            offload_policy=offload,
            reshard_after_forward=not model.one_rank_holds_all,
        )


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def expect_backward(model: PackedModel, *, last: bool) -> None:
    """Tell the model whether the next backward pass is the `last` of an optimizer step.

    A single rank accumulates its gradients outside FSDP, and syncs them once per step instead of once per micro-batch;
    the sum is the same. Several ranks reduce the gradients of each micro-batch, so that no rank holds all of them.
    """
    if model.one_rank_holds_all and model.syncs_gradients != last:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.syncs_gradients = last


def check_packing(model: PackedModel) -> str:
    """Raise CannotPack unless short packed sequences get the same log-probabilities as in the model's own forward pass.

    This detects anything that `forward` leaves out: a scaling of the logits, a state that continues into the next
    sequence, a bias inside the attention. The last sequences have the highest positions below `max_tokens`, and sliding
    windows are made narrow, to detect what only long sequences show. Afterwards only the weights of `model` are usable.

    Returns why the model cannot compute a shared prefix once, because it carries a state or its log-probabilities
    differ; "" if it can.
    """
    causal_lm, max_tokens = model.causal_lm, model.settings.max_tokens or 0
    lengths, shared = (7, 6, 6, 5), (0, 4, 0, 4)  # in the order of a pack
    prefixes = prefixes_of(lengths, shared)
    tokens = (np.arange(11, 27) * 7919 % model.vocab_size)[prefixes.places.numpy()]
    sequences = [
        TokenSequence.bare(part, np.arange(len(part)) > 0) for part in np.split(tokens, np.cumsum(lengths)[:-1])
    ]
    high = max(0, max_tokens - max(lengths[2:]))
    starts = (0, 0, high, high)
    position_ids = torch.cat([torch.arange(length) + start for start, length in zip(starts, lengths, strict=True)])
    packed = dataclasses.replace(pack(sequences), position_ids=position_ids)
    _narrow_windows(causal_lm)
    model.shares_prefixes = not model.carries_state
    with torch.no_grad(), model.at_temperature(1.0):
        found = model(packed).logprobs
        found_shared = model(dataclasses.replace(packed, prefixes=prefixes)).logprobs if model.shares_prefixes else None
        causal_lm.set_attn_implementation("eager")
        alone = zip(*(torch.split_with_sizes(each, lengths) for each in (packed.tokens, position_ids)), strict=True)
        expected = torch.cat([_plain_logprobs(causal_lm, *sequence) for sequence in alone])
    difference = float((found - expected).abs().max())
    if not difference <= 1e-3:
        raise CannotPack(
            f"{type(causal_lm).__name__} gives other log-probabilities for packed sequences than for single ones, by "
            f"{difference:.3g} nats"
        )
    if found_shared is None:
        return "its layers carry a state from token to token"
    of_shared = float((found_shared - expected).abs().max())
    return "" if of_shared <= 1e-3 else f"the model's log-probabilities would differ by {of_shared:.3g} nats"


def _read(folder: Path, settings: ModelSettings) -> tuple[dict[str, Tensor], str]:
    """Every tensor of the model, and why it cannot compute a shared prefix once: see `check_packing`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    causal_lm = auto_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, trust_remote_code=False
    )
    fix_frequencies(causal_lm, max_tokens=settings.max_tokens)
    separate_states(causal_lm)
    refused = check_packing(PackedModel(causal_lm, folder=folder, settings=settings).eval())
    if settings.lora.rank:
        add_adapters(causal_lm, settings.lora)
        check_merged(causal_lm)
    return tensors_of(causal_lm), refused


def _narrow_windows(causal_lm: PreTrainedModel) -> None:
    """Make every sliding window 3 tokens wide, in the configuration and in layers that store a width."""
    for attributes in (vars(causal_lm.config.get_text_config()), *map(vars, causal_lm.modules())):
        if attributes.get("sliding_window"):
            attributes["sliding_window"] = 3


def _plain_logprobs(causal_lm: PreTrainedModel, tokens: Tensor, position_ids: Tensor) -> Tensor:
    output = causal_lm(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False)
    logprobs: Tensor = output.logits[0].float().log_softmax(dim=-1)
    return logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)
