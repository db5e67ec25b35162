"""A Hugging Face causal LM that reads packed rows: loaded from a folder, sharded over the ranks, gathered again."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from common.config import LoraConfig
from common.weights import TensorEntry, layout
from learner.model.attention import PackRows, packed_attention, rows_of
from learner.model.compiler import check_compiler, compile_layers
from learner.model.logprobs import TokenLogprobs, chunked_logprobs, predictions
from learner.model.lora import adapters_of, add_adapters, folder_name, is_of_adapter
from learner.pack import Packed
from learner.ranks import Ranks
from learner.model.skeleton import Refusal, agree, fill, skeleton_of, tensors_of

M = TypeVar("M", bound="PackedModel")
PACKED_ATTENTION = "slipstream_packed"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedModel(nn.Module):
    """A causal LM whose forward pass takes a pack and gives the log-probabilities of its loss tokens."""

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path) -> None:
        super().__init__()
        self.causal_lm: PreTrainedModel = causal_lm
        self.folder = folder  # where it was loaded from
        self.one_rank_holds_all = False  # sharded over one rank, and not offloaded: see `expect_backward`
        self.hands_over = True  # gradients to FSDP, after the next backward pass

    @property
    def vocab_size(self) -> int:
        return int(self.causal_lm.config.vocab_size)

    def heads(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What trains and is written down with the causal LM, and is no part of it."""
        return iter(())

    def forward(
        self, packed: Packed, *, temperature: float, chunk_tokens: int, entropy_gradient: bool = False
    ) -> TokenLogprobs:
        """Hidden states of the packed row, then log-probabilities in chunks: see `chunked_logprobs`."""
        hidden, targets = predictions(self.hidden_states(packed), packed.tokens, packed.loss_mask)
        return self.logprobs(
            hidden,
            targets,
            packed.kept,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )

    def hidden_states(self, packed: Packed) -> Float[Tensor, "tokens hidden"]:
        """The decoder's last, of every token of the pack."""
        # No mask and no cache: with either, transformers would take the row for one sequence.
        hidden: Tensor = self.causal_lm.get_decoder()(
            input_ids=packed.tokens[None],
            position_ids=packed.position_ids[None],
            attention_mask=None,
            use_cache=False,
            **_sequence_bounds(packed),
        ).last_hidden_state[0]
        return hidden

    def logprobs(
        self,
        hidden: Float[Tensor, "loss_tokens hidden"],
        targets: Int[Tensor, " loss_tokens"],
        kept: Int[Tensor, "loss_tokens width"] | None,
        *,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> TokenLogprobs:
        """The output embedding's word on each of `targets`."""
        head = self.causal_lm.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            head.bias,
            targets,
            kept=kept,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )


def load_model(
    path: str | Path,
    *,
    ranks: Ranks,
    dtype: str,
    activation_checkpointing: bool,
    compile: bool = False,
    cpu_offload: bool = False,
    lora: LoraConfig | None = None,
) -> PackedModel:
    """Load the policy in folder `path`: see `load_kind`."""
    return load_kind(
        PackedModel,
        path,
        ranks=ranks,
        dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        cpu_offload=cpu_offload,
        lora=lora,
    )


def load_kind(
    kind: type[M],
    path: str | Path,
    *,
    ranks: Ranks,
    dtype: str,
    activation_checkpointing: bool,
    compile: bool = False,
    cpu_offload: bool = False,
    lora: LoraConfig | None = None,
) -> M:
    """Load the causal LM in folder `path`, float32 master weights, and shard it over `ranks`.

    `kind` is what is made of it: see `learner.value_model`.
    `dtype` is that of the forward pass, float32 or bfloat16; logits are always float32. With `compile` the layers run
    as compiled code, see `learner.compiler`. With `cpu_offload` weights, gradients and optimizer state live in host
    memory, and a layer's weights come to the device as it is reached. With a `lora` of some rank only adapters train,
    see `learner.lora`. Every rank calls it.
    Raises ValueError for a folder that holds no causal LM, and for a model that does not read packed rows right;
    ConfigError where the layers cannot be compiled.
    """
    if compile:
        check_compiler(ranks.device)
    folder = Path(path)
    tensors = _read_on_first_rank(folder, lora, ranks=ranks)
    causal_lm = skeleton_of(folder, attention=PACKED_ATTENTION)
    causal_lm.set_attn_implementation(_attention_for(ranks.device, dtype))
    if lora is not None and lora.rank:
        add_adapters(causal_lm, lora)
    # Always in evaluation mode: dropout would make the log-probabilities differ from the actors'.
    model = kind(causal_lm, folder=folder).eval()
    layers = _decoder_layers(causal_lm)
    if compile:  # before a checkpoint, which then calls compiled code twice, and before FSDP, whose hooks stay outside
        compile_layers(layers)
    if activation_checkpointing:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    # One rank holds every weight anyway: to let go of its copy after each layer and make it anew would be for nothing.
    model.one_rank_holds_all = ranks.num_ranks == 1 and not cpu_offload
    on_one_cpu = model.one_rank_holds_all and ranks.device.type == "cpu"
    modules: list[nn.Module] = [model] if on_one_cpu else [*layers, model]
    for module in modules:
        fully_shard(
            module,
            mesh=ranks.mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=not model.one_rank_holds_all,
        )
    fill(causal_lm, tensors, ranks=ranks, cpu_offload=cpu_offload)
    return model


def expect_backward(model: PackedModel, *, last: bool) -> None:
    """Say whether the coming backward pass is the `last` of an optimizer step.

    One rank adds up its gradients outside FSDP and hands them over with the last one, once a step instead of once a
    micro-batch; the sum is the same. More ranks reduce each micro-batch's, so that no rank ever holds them whole.
    """
    if model.one_rank_holds_all and model.hands_over != last:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.hands_over = last


def check_packing(model: PackedModel) -> None:
    """Raise ValueError unless two short sequences, packed, get the log-probabilities of the model's own forward pass.

    It sees whatever `forward` leaves out: a scaling of the logits, a state that runs on from one sequence into the
    next, a bias inside the attention.
    """
    causal_lm, vocab_size = model.causal_lm, model.causal_lm.config.vocab_size
    lengths = (7, 4)
    tokens = torch.arange(11, 22) * 7919 % vocab_size
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    packed = Packed(
        tokens=tokens,
        position_ids=position_ids,
        loss_mask=position_ids > 0,
        behaviour_logprobs=torch.zeros(11),
        advantages=torch.zeros(11),
        kept=None,
        lengths=lengths,
    )
    with torch.no_grad():
        found = model(packed, temperature=1.0, chunk_tokens=5).logprobs
        causal_lm.set_attn_implementation("eager")
        expected = torch.cat([_plain_logprobs(causal_lm, sequence) for sequence in tokens.split(lengths)])
        causal_lm.set_attn_implementation(PACKED_ATTENTION)
    difference = float((found - expected).abs().max())
    if difference > 1e-3:
        raise ValueError(
            f"{model.folder}: {type(causal_lm).__name__} gives other log-probabilities for packed sequences than for "
            f"single ones, by {difference:.3g} nats; this architecture cannot be trained here"
        )


def named_shards(model: PackedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter as this rank holds it: its float32 shard, by name; adapters and what they freeze included.

    A head that is tied to the embedding does not come twice.
    """
    _reshard(model)
    yield from model.causal_lm.named_parameters()
    yield from model.heads()


def _reshard(model: PackedModel) -> None:
    """A forward pass that no backward pass follows leaves parameters whole, in the forward pass's dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_layout(model: PackedModel) -> list[TensorEntry]:
    """Name, shape and bytes of each of `full_tensors`, in their order. Gathers nothing."""
    return layout(
        (folder_name(name), "float32", tuple(shard.shape))
        for name, shard in named_shards(model)
        if not is_of_adapter(name)
    )


def full_tensors(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight whole, one at a time, in float32: the names and tensors that vLLM's `load_weights` takes.

    Adapters are merged into the weights that they stand beside. Gathering is collective: every rank iterates to
    the end. What the caller lets go of is freed before the next is gathered.
    """
    for name, shard in merged_shards(model):
        yield name, whole(shard)


@torch.no_grad()
def merged_shards(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight as this rank holds it, adapters merged in, under its name in the Hugging Face folder. Collective."""
    _reshard(model)  # the adapters' parameters too are then the ranks' shards
    adapters = adapters_of(model.causal_lm)
    for name, shard in named_shards(model):
        if not is_of_adapter(name):
            adapter = adapters.get(folder_name(name))
            yield folder_name(name), shard.detach() if adapter is None else adapter.merged(shard.detach())


def whole(shard: Tensor) -> Tensor:
    """The tensor that the ranks hold in shards. Collective."""
    detached = shard.detach()
    assert isinstance(detached, DTensor)
    return detached.full_tensor()


def _read_on_first_rank(folder: Path, lora: LoraConfig | None, *, ranks: Ranks) -> dict[str, Tensor]:
    """What rank 0 reads in `folder`, checked, by name; nothing on the others. Raises ValueError on every rank."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"`model.path` {folder} has no config.json; it must be a Hugging Face folder")
    transformers_logging.disable_progress_bar()
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    tensors, refusal = {}, None
    if ranks.rank == 0:
        try:
            tensors = tensors_of(_read(folder, lora))
        except ValueError as error:
            refusal = Refusal(reason=str(error))
    agree(refusal, ranks=ranks)
    return tensors


def _read(folder: Path, lora: LoraConfig | None) -> PreTrainedModel:
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    check_packing(PackedModel(causal_lm, folder=folder).eval())
    if lora is not None and lora.rank:
        add_adapters(causal_lm, lora)
    return causal_lm


def _attention_for(device: torch.device, dtype: str) -> str:
    # flash-attn's kernels know half precision only.
    if device.type == "cuda" and dtype == "bfloat16" and find_spec("flash_attn") is not None:
        return "flash_attention_2"
    return PACKED_ATTENTION


def _sequence_bounds(packed: Packed) -> dict[str, object]:
    """Where sequences begin and end, in the words of our attention and in those of flash-attn's varlen kernels."""
    bounds = torch.tensor([0, *packed.lengths], device=packed.tokens.device).cumsum(0).int()
    return {
        "rows": PackRows(rows=rows_of(packed.lengths)),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(packed.lengths),
        "max_length_k": max(packed.lengths),
    }


def _decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    unsplit = set(causal_lm._no_split_modules or [])
    return [module for module in causal_lm.modules() if type(module).__name__ in unsplit]


def _plain_logprobs(causal_lm: PreTrainedModel, tokens: Tensor) -> Tensor:
    logprobs: Tensor = causal_lm(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(dim=-1)
    return logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)
