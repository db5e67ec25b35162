"""How new weights get into a vLLM worker: staged in the background, committed in one go at a token boundary.

vLLM's own engines load while they receive, so a transfer that dies half-way leaves a worker that can serve nothing.
Here a worker first receives the whole buffer into memory and verifies it, while it goes on generating; only then does
vLLM's weight-update session (start, update, finish) open. On a CPU the weights are loaded into a twin of the model
before that, and the session swaps the two. On a GPU, where graphs of kernels hold the addresses of the weights and
memory is short, the session loads from host memory.

Importing this module registers the engine with vLLM; `worker_extension_cls` makes every worker process import it.
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
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from actors.engine import WeightsRefused
from actors.packed_nccl import PackedNccl
from actors.receive import Receiver, ReceiverInfo
from actors.staged_weights import ModelFolder
from actors.twin import swap, twin_of
from common.weights import Offer
from common.wire import decode

BACKEND = "slipstream"
WORKER_EXTENSION = "actors.staged_transfer.StagingWorker"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A verified set of weights, waiting for its commit."""

    policy_version: int
    tensors: dict[str, torch.Tensor]  # in host memory, by the name that the model's loader knows; empty beside a twin
    twin: torch.nn.Module | None  # the model with these weights in it, on a CPU


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of actors.receive.ReceiverInfo: plain values, so that they reach a worker in any process."""

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
    """One worker's side of a refresh: `stage`, ask until `ended`, then vLLM's update session."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        # One thread: a stage that is overtaken by a newer one ends before the newer one begins.
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-weights")
        self._receiver: Receiver | None = None
        self._newest: Future[StagedWeights] | None = None
        self._folder = ModelFolder(
            Path(vllm_config.model_config.model),
            dtype=vllm_config.model_config.dtype,
            tied=bool(vllm_config.model_config.hf_text_config.tie_word_embeddings),
        )

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Connect the receiver."""
        over_nccl = PackedNccl(self.vllm_config, self.device) if self.device.type == "cuda" else None
        info = ReceiverInfo(**vars(init_info))
        if self.parallel_config.rank > 0 and info.transport == "broadcast":
            info = replace(info, transport="pull")  # an actor is one member of a broadcast: its first worker
        self._receiver = Receiver(info, over_nccl)

    def stage(self, offer: Offer) -> None:
        """Begin to receive and verify `offer` in the background; it takes the place of an earlier stage."""
        self._newest = self._background.submit(self._receive, offer)

    def ended(self) -> bool:
        """True once the newest stage is staged or refused."""
        assert self._newest is not None, "asked for the end of a stage that was never begun"
        return self._newest.done()

    def refusal(self) -> str | None:
        """Why the newest stage, which has ended, failed; None when its weights are staged."""
        assert self._newest is not None, "asked for the end of a stage that was never begun"
        error = self._newest.exception(timeout=0)
        if error is None:
            return None
        return str(error) if isinstance(error, WeightsRefused) else f"{type(error).__name__}: {error}"

    def _receive(self, offer: Offer) -> StagedWeights:
        assert self._receiver is not None, "stage before init_transfer_engine"
        # Before the bytes travel, and long before a commit: a name that the model does not have would break the worker.
        self._folder.check(offer.manifest)
        version, tensors = (
            offer.manifest.policy_version,
            self._folder.tensors(offer.manifest, self._receiver.receive(offer)),
        )
        if not current_platform.is_cpu():
            return StagedWeights(policy_version=version, tensors=tensors, twin=None)
        twin: Any = twin_of(self.model)
        initialize_layerwise_reload(twin)
        twin.load_weights(tensors.items())
        finalize_layerwise_reload(twin, self.model_config)
        repack_embeddings(twin)
        return StagedWeights(policy_version=version, tensors={}, twin=twin)

    def start_weight_update(self) -> None:
        """Open the update session: on a GPU vLLM's loaders now take whole tensors of a checkpoint."""
        if not current_platform.is_cpu():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights. The base class would end in an accelerator's synchronize, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load from memory, or take the twin's; nothing travels here."""
        assert self._newest is not None and self._newest.done(), "commit before the stage has ended"
        staged = self._newest.result()
        assert staged.policy_version == update_info.policy_version, "commit of another version than staged"
        if staged.twin is None:
            self.model.load_weights(staged.tensors.items())
        else:
            swap(self.model, staged.twin)

    def finish_weight_update(self) -> None:
        """Close the session and let go of what was staged."""
        if not current_platform.is_cpu():
            finalize_layerwise_reload(self.model, self.model_config)
        self._newest = None

    def leave_broadcasts(self) -> None:
        if self._receiver is not None:
            self._receiver.leave_broadcasts()

    def shutdown(self) -> None:
        """Let go of the receiver, on its own thread and after a stage under way, which ends by its own deadline."""
        if self._receiver is not None:
            self._background.submit(self._receiver.close)
            self._receiver = None
        self._background.shutdown(wait=False)


class StagingWorker:
    """What vLLM's worker learns by `worker_extension_cls`: calls of `collective_rpc` that its own worker lacks."""

    weight_transfer_engine: StagedTransferEngine

    def stage_weights(self, offer_frame: bytes) -> None:
        """Begin a stage and return at once; `offer_frame` is an encoded Offer."""
        self.weight_transfer_engine.stage(decode(Offer, offer_frame))

    def stage_ended(self) -> bool:
        """True once the newest stage is staged or refused."""
        return self.weight_transfer_engine.ended()

    def stage_refusal(self) -> str | None:
        """Why the newest stage failed; None when its weights are staged."""
        return self.weight_transfer_engine.refusal()

    def leave_broadcasts(self) -> None:
        self.weight_transfer_engine.leave_broadcasts()


def repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the embedding matrices again on CPU.

    A reload repacks only layers that a tensor was loaded for. A tied output layer has none of its own, and went on
    multiplying by the packed copy of the old weights: logits wrong by 3 nats, and no error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
