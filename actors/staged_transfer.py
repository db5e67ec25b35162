"""Brings new weights into a vLLM worker: stages them in the background, and commits them at a token boundary.

vLLM's own transfer engines load while they receive, so a transfer that fails half-way leaves a worker that cannot
serve. Here a worker first receives the whole buffer into memory and verifies it, while generation continues. Only then
does it open vLLM's weight-update session (start, update, finish). On a CPU the weights are loaded into a twin of the
model first, and the session swaps the two. On a GPU, where CUDA graphs contain the addresses of the weights and memory
is short, the session loads from host memory.

Importing this module registers the transfer engine with vLLM; `worker_extension_cls` makes every worker import it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from actors.broadcast import Gpu
from actors.engine import WeightsRefused, WeightsUnfit
from actors.receive import Receiver, ReceiverInfo
from actors.shared_memory import map_shared
from actors.staged_weights import ModelFolder
from actors.twin import forget_reload, swap, twin_of
from common.weights import Offer
from common.wire import decode

BACKEND = "slipstream"
WORKER_EXTENSION = "actors.staged_transfer.StagingWorker"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A verified set of weights, waiting for its commit."""

    policy_version: int
    tensors: dict[str, torch.Tensor]  # in host memory, by the names of the model's loader; empty if there is a twin
    twin: torch.nn.Module | None  # on a CPU, a copy of the model with these weights; None on a GPU
    untouched: list[str]  # parameters of the model that its loader took no tensor for; on a GPU filled in at the commit


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of actors.receive.ReceiverInfo, as plain values that vLLM can send to workers in other processes."""

    redis_url: str
    run_id: str
    actor: str
    transport: str
    chunk_bytes: int
    timeout_s: float
    disk: str


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The staged version to commit."""

    policy_version: int


class StagedTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):  # type: ignore[misc]
    """A worker's part in a refresh: call `stage`, poll `ended`, `prepare`, poll `ended`, run vLLM's update session.

    Only an engine's first worker receives. The others map its memory, so a machine has one host copy for an engine.
    """

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        # One thread, so that a stage ends before a newer one begins.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-weights")
        self._receiver: Receiver | None = None  # of the first worker
        self._offer: Offer | None = None  # the newest
        self._received: Future[torch.Tensor | None] | None = None  # None at a worker that does not receive
        self._newest: Future[StagedWeights] | None = None  # of the newest offer, once it was received
        self._committed: StagedWeights | None = None  # with the weights before in its twin, until they are forgotten
        self._folder = ModelFolder(
            Path(vllm_config.model_config.model),
            dtype=vllm_config.model_config.dtype,
            tied=_tied(vllm_config.model_config),
        )

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Connect the receiver, if this is the engine's first worker."""
        if self.parallel_config.rank > 0:
            return
        gpu = None
        if self.device.type == "cuda":
            gpu = Gpu(uuid=str(torch.cuda.get_device_properties(self.device).uuid), device=self.device)
        shared = self.parallel_config.world_size > 1
        self._receiver = Receiver(ReceiverInfo(**vars(init_info)), gpu, shared=shared)

    def stage(self, offer: Offer) -> None:
        """Begin to receive and verify `offer` in the background, instead of any earlier offer."""
        self._offer, self._newest = offer, None
        self._received = self._background.submit(self._receive, offer)

    def shared_path(self) -> str:
        """Where the other workers can map what this one has received; empty if there are none, or it receives none."""
        return self._receiver.shared_path if self._receiver is not None else ""

    def prepare(self, shared_path: str) -> None:
        """Begin to prepare in the background what was received, here or by the first worker at `shared_path`."""
        assert self._received is not None and self._offer is not None, "prepare() without stage()"
        self._newest = self._background.submit(self._prepare, self._offer, self._received.result(), shared_path)
        self._received = None  # it refers to the weights, which the receiver may replace

    def ended(self) -> bool:
        """Whether the newest stage, or its preparation, has ended, well or refused."""
        return self._step().done()

    def refusal(self) -> tuple[str, bool] | None:
        """Why what has ended was refused, and whether its weights do not fit; None if all is well."""
        error = self._step().exception(timeout=0)
        if error is None:
            return None
        if isinstance(error, WeightsRefused):
            return str(error), isinstance(error, WeightsUnfit)
        return f"{type(error).__name__}: {error}", True

    def _step(self) -> Future[Any]:
        step = self._newest or self._received
        assert step is not None, "no stage was begun"
        return step

    def _receive(self, offer: Offer) -> torch.Tensor | None:
        if self._receiver is None:
            return None
        # Before the transfer and long before a commit: a name that the model does not have would break the worker.
        self._folder.check(offer.manifest)
        return self._receiver.receive(offer)

    def _prepare(self, offer: Offer, received: torch.Tensor | None, shared_path: str) -> StagedWeights:
        version = offer.manifest.policy_version
        tensors = self._folder.tensors(offer.manifest, map_shared(shared_path) if received is None else received)
        if not current_platform.is_cpu():
            return StagedWeights(policy_version=version, tensors=tensors, twin=None, untouched=[])
        twin: Any = twin_of(self.model)
        forget_experts(twin)
        initialize_layerwise_reload(twin)
        untouched = _load(twin, tensors)
        finalize_layerwise_reload(twin, self.model_config)
        check_experts(twin)
        repack_embeddings(twin)
        forget_reload(twin)
        return StagedWeights(policy_version=version, tensors={}, twin=twin, untouched=untouched)

    def start_weight_update(self) -> None:
        """Open the update session: on a GPU, vLLM's loaders now accept whole tensors of a checkpoint."""
        if not current_platform.is_cpu():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights. The base class would call an accelerator's synchronize, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load the staged weights from memory, or swap with the twin. Nothing is transferred."""
        assert self._newest is not None and self._newest.done(), "commit before the stage has ended"
        staged = self._newest.result()
        assert staged.policy_version == update_info.policy_version, "commit of another version than the staged one"
        if staged.twin is None:
            staged.untouched[:] = _load(self.model, staged.tensors)
        else:
            swap(self.model, staged.twin)
        self._committed = replace(staged, tensors={})

    def finish_weight_update(self) -> None:
        """Close the session. The weights before are kept until `settle_weights`."""
        if not current_platform.is_cpu():
            finalize_layerwise_reload(self.model, self.model_config)
        self._newest = None

    def settle_weights(self, *, revert: bool) -> bool:
        """Forget the weights before the last commit, or serve them again; return whether this could be done."""
        committed, self._committed = self._committed, None
        if not revert:
            return True
        if committed is None or committed.twin is None:
            return False
        swap(self.model, committed.twin)
        return True

    def untouched(self) -> list[str]:
        """The parameters of the model that the last commit brought no tensor for."""
        return self._committed.untouched if self._committed else []

    def leave_broadcasts(self) -> None:
        if self._receiver is not None:
            self._receiver.leave_broadcasts()

    def shutdown(self) -> None:
        """Close the receiver in the background, after a running stage, which ends by its own deadline."""
        if self._receiver is not None:
            self._background.submit(self._receiver.close)
            self._receiver = None
        self._background.shutdown(wait=False)


class StagingWorker:
    """The methods that `worker_extension_cls` adds to vLLM's worker, for calls by `collective_rpc`."""

    weight_transfer_engine: StagedTransferEngine

    def stage_weights(self, offer_frame: bytes) -> None:
        """Begin a stage and return at once; `offer_frame` is an encoded Offer."""
        self.weight_transfer_engine.stage(decode(Offer, offer_frame))

    def stage_ended(self) -> bool:
        """Whether the newest stage, or its preparation, has ended, well or refused."""
        return self.weight_transfer_engine.ended()

    def stage_refusal(self) -> tuple[str, bool] | None:
        """Why the newest stage was refused, and whether its weights do not fit; None if all is well."""
        return self.weight_transfer_engine.refusal()

    def received_path(self) -> str:
        """Where the other workers can map what this one has received; empty if they cannot."""
        return self.weight_transfer_engine.shared_path()

    def prepare_weights(self, shared_path: str) -> None:
        """Begin to prepare the received weights for a commit, and return at once."""
        self.weight_transfer_engine.prepare(shared_path)

    def settle_weights(self, revert: bool) -> bool:
        """Forget the weights before the last commit, or serve them again; return whether this could be done."""
        return self.weight_transfer_engine.settle_weights(revert=revert)

    def untouched_parameters(self) -> list[str]:
        """The parameters of the model that the last commit brought no tensor for."""
        return self.weight_transfer_engine.untouched()

    def leave_broadcasts(self) -> None:
        self.weight_transfer_engine.leave_broadcasts()


def forget_experts(twin: torch.nn.Module) -> None:
    """Make a reload of `twin` pack its experts for the CPU's kernels, which vLLM does only if there is no kernel yet.

    A reload into packed experts copied the plain weights over the packed ones: logits were wrong by 10 nats, without an
    error.
    """
    for module in twin.modules():
        if isinstance(module, FusedMoEMethodBase):
            module.moe_kernel = None


def check_experts(twin: torch.nn.Module) -> None:
    """Raise WeightsUnfit if a reload has not packed the experts again: a forward pass would end the engine.

    Some of vLLM's loaders, such as that of gpt-oss, copy experts past its reload, into tensors without memory.
    """
    if any(isinstance(module, FusedMoEMethodBase) and module.moe_kernel is None for module in twin.modules()):
        raise WeightsUnfit(
            f"vLLM's {type(twin).__name__} cannot load experts while it runs: its loader copies them past vLLM's "
            "reload; train another model, or use a version of vLLM that reloads this one"
        )


def _load(model: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Give `tensors` to the model's loader; return the names of the parameters that it took nothing for."""
    known = [name for name, _ in model.named_parameters()]
    loaded = model.load_weights(tensors.items())
    return [] if loaded is None else [name for name in known if name not in loaded]


def _tied(model_config: Any) -> bool:
    """Whether the output layer is the embedding matrix."""
    # Of some vision-language models only the whole configuration says so, and not that of its text.
    text = model_config.hf_text_config
    return bool((text if hasattr(text, "tie_word_embeddings") else model_config.hf_config).tie_word_embeddings)


def repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the embedding matrices again on a CPU.

    A reload repacks only layers for which a tensor was loaded. A tied output layer has no tensor of its own, and kept
    multiplying by the packed copy of the old weights: logits were wrong by 3 nats, without an error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
