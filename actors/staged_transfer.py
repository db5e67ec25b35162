"""How new weights get into a vLLM worker: staged in the background, committed in one go at a token boundary.

vLLM's own engines load while they receive, so a transfer that dies half-way leaves a worker that can serve nothing.
Here a worker first receives the whole buffer into memory and verifies it, while it goes on generating; only then does
vLLM's weight-update session (start, update, finish) open, and it reads from memory only.

Importing this module registers the engine with vLLM; `worker_extension_cls` makes every worker process import it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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
from actors.receive import Receiver, ReceiverInfo
from common.weights import Manifest, Offer, TensorEntry
from common.wire import decode

BACKEND = "slipstream"
WORKER_EXTENSION = "actors.staged_transfer.StagingWorker"
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A verified set of weights, waiting for its commit."""

    manifest: Manifest
    buffer: torch.Tensor  # uint8, the flat buffer of `manifest`, in host memory


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of actors.receive.ReceiverInfo: plain values, so that they reach a worker in any process."""

    redis_url: str
    run_id: str
    actor: str
    transport: str
    chunk_bytes: int
    timeout_s: float


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
        self._shapes = checkpoint_shapes(Path(vllm_config.model_config.model))
        self._tied = bool(vllm_config.model_config.hf_text_config.tie_word_embeddings)

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Connect the receiver."""
        self._receiver = Receiver(ReceiverInfo(**vars(init_info)))

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
        check_manifest(offer.manifest, self._shapes, tied=self._tied)
        return StagedWeights(manifest=offer.manifest, buffer=self._receiver.receive(offer))

    def start_weight_update(self) -> None:
        """Open the update session: vLLM's loaders now take whole checkpoint tensors, packed layers included."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights. The base class would end in an accelerator's synchronize, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load from memory; nothing travels here."""
        assert self._newest is not None and self._newest.done(), "commit before the stage has ended"
        staged = self._newest.result()
        assert staged.manifest.policy_version == update_info.policy_version, "commit of another version than staged"
        self.model.load_weights((entry.name, tensor_of(entry, staged.buffer)) for entry in staged.manifest.tensors)

    def finish_weight_update(self) -> None:
        """Close the session and let go of the staged buffer."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            repack_embeddings(self.model)
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


def tensor_of(entry: TensorEntry, buffer: torch.Tensor) -> torch.Tensor:
    """The view of flat `buffer` that is `entry`: no copy."""
    flat = buffer[entry.offset : entry.offset + entry.num_bytes]
    return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a Hugging Face folder, by name. Raises ValueError where there are none."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(f"`model.path` {folder} holds no *.safetensors; save the model with save_pretrained")
    return shapes


def check_manifest(manifest: Manifest, shapes: dict[str, list[int]], *, tied: bool) -> None:
    """Raise WeightsRefused unless `manifest` describes exactly the tensors that the model was loaded from."""
    offered = {entry.name: entry.shape for entry in manifest.tensors}
    expected = dict(shapes)
    if tied:  # the same tensor under a second name: a state_dict lists it, a saved folder does not
        offered.pop("lm_head.weight", None)
        expected.pop("lm_head.weight", None)
    if offered == expected:
        return
    wrong = sorted(name for name in offered.keys() | expected.keys() if offered.get(name) != expected.get(name))
    raise WeightsRefused(
        f"version {manifest.policy_version} does not fit the model: {len(wrong)} tensors differ, first {wrong[0]} "
        f"(offered {offered.get(wrong[0])}, expected {expected.get(wrong[0])}); is the learner training another model?"
    )


def repack_embeddings(model: torch.nn.Module) -> None:
    """Pack the embedding matrices again on CPU.

    A reload repacks only layers that a tensor was loaded for. A tied output layer has none of its own, and went on
    multiplying by the packed copy of the old weights: logits wrong by 3 nats, and no error.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
