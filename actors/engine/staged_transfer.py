"""Brings new weights into a vLLM worker: stages them in the background, and commits them at a token boundary.

vLLM's own transfer engines load while they receive, so a transfer that fails half-way leaves a worker that cannot
serve. Here a worker first receives the whole buffer into memory and verifies it, while generation continues. Then it
loads the weights into a shadow model. Only after that does it open vLLM's weight-update session (start, update,
finish): on a CPU it swaps the two; on a GPU, where CUDA graphs contain the addresses of the weights, it exchanges their
contents. Without room for a shadow on a GPU, the session loads from host memory.

Importing this module registers the transfer engine with vLLM; `worker_extension_cls` makes every worker import it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from slipstream.actors.engine.absent import mask_absent
from slipstream.actors.engine.kept_shadow import KeptShadow
from slipstream.actors.engine.reload import Loaded, loaded_on_cpu, reload
from slipstream.actors.weights.receive import Receiver, ReceiverInfo
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.actors.weights.staged_weights import ModelFolder
from slipstream.actors.weights.weights_memory import MappedWeights, WeightsMemory
from slipstream.common.process.wire import decode
from slipstream.common.transfer.weights import Offer

BACKEND = "slipstream"
WORKER_EXTENSION = "slipstream.actors.engine.staged_transfer.StagingWorker"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A verified set of weights, waiting for its commit."""

    policy_version: int
    tensors: dict[str, torch.Tensor]  # in host memory, by the names of the model's loader; empty if they are loaded
    loaded: Loaded | None  # into a shadow; None on a GPU without one: the commit loads


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Plain values, which vLLM can send to workers in other processes."""

    receiver: dict[str, Any]  # the fields of slipstream.actors.weights.receive.ReceiverInfo
    shadow_room_bytes: int  # of its GPU, which the engine left to a shadow
    absent: list[int]  # ids that the tokenizer lacks


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
        self._memory: WeightsMemory | MappedWeights | None = None  # of received weights
        self._offer: Offer | None = None  # the newest
        self._received: Future[torch.Tensor | None] | None = None  # None at a worker that does not receive
        self._newest: Future[StagedWeights] | None = None  # of the newest offer, once received, until it is committed
        self._committed: StagedWeights | None = None  # with the weights before in its shadow, until it is settled
        self._untouched: list[str] = []  # parameters that the last commit brought no tensor for
        self._has_committed = False
        self._kept_shadow: KeptShadow | None = None  # of a model on a GPU
        self._folder = ModelFolder(
            Path(vllm_config.model_config.model),
            dtype=vllm_config.model_config.dtype,
            tied=_tied(vllm_config.model_config),
        )

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Mask absent ids; connect the receiver, if this is the engine's first worker."""
        mask_absent(self.model, init_info.absent, self.device)
        if keeps_addresses(self.device):
            self._kept_shadow = KeptShadow(
                self.model, self.model_config, device=self.device, room_bytes=init_info.shadow_room_bytes
            )
        gpu = self.device if self.device.type == "cuda" else None
        if self.parallel_config.rank > 0:
            self._memory = MappedWeights(gpu)
            return
        shared = self.parallel_config.world_size > 1
        self._receiver = Receiver(ReceiverInfo(**init_info.receiver), gpu, shared=shared)
        self._memory = self._receiver.memory

    def stage(self, offer_frame: bytes) -> None:
        """Begin to receive and verify an encoded Offer in the background, instead of any earlier offer."""
        self._offer, replaced, self._newest = decode(Offer, offer_frame), self._newest, None
        self._received = self._background.submit(self._receive, self._offer, replaced)

    def shared_path(self) -> str:
        """Where the other workers can map what this one has received; empty if there are none, or it receives none."""
        return self._receiver.memory.path if self._receiver is not None else ""

    def prepare(self, shared_path: str) -> None:
        """Begin to prepare in the background what was received, here or by the first worker at `shared_path`.

        The last commit must be settled: a shadow that is kept has the weights before.
        """
        assert self._committed is None, "prepare() before the last commit was settled"
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

    def _receive(self, offer: Offer, replaced: Future[StagedWeights] | None) -> torch.Tensor | None:
        if replaced is not None and not replaced.exception() and (loaded := replaced.result().loaded):
            loaded.free()
        if self._receiver is None:
            return None
        # Before the transfer and long before a commit: a name that the model does not have would break the worker.
        self._folder.check(offer.manifest)
        return self._receiver.receive(offer)

    def _prepare(self, offer: Offer, received: torch.Tensor | None, shared_path: str) -> StagedWeights:
        version = offer.manifest.policy_version
        if isinstance(self._memory, MappedWeights):
            received = self._memory.at(shared_path)
        assert received is not None and self._memory is not None, "prepare() after shutdown()"
        tensors = self._folder.tensors(offer.manifest, received)
        if self._kept_shadow is not None:
            loaded = self._kept_shadow.load(tensors, has_committed=self._has_committed)
        else:
            loaded = loaded_on_cpu(self.model, tensors, self.model_config)
        self._memory.pinning.used(self._memory.flat)
        return StagedWeights(policy_version=version, tensors={} if loaded else tensors, loaded=loaded)

    def start_weight_update(self) -> None:
        """Open the update session."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Commit the staged weights. The base class would call an accelerator's synchronize, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Switch to the shadow's weights, or load the staged ones from memory. Nothing is transferred."""
        assert self._newest is not None and self._newest.done(), "commit before the stage has ended"
        staged = self._newest.result()
        assert staged.policy_version == update_info.policy_version, "commit of another version than the staged one"
        if staged.loaded is None:
            self._untouched = reload(self.model, staged.tensors, self.model_config)
        else:
            staged.loaded.switch()
            self._untouched = staged.loaded.untouched
        self._committed, self._has_committed = replace(staged, tensors={}), True

    def finish_weight_update(self) -> None:
        """Close the session. The weights before are kept until `keep_or_revert`, if there is a shadow."""
        self._newest = None

    def keep_or_revert(self, revert: bool) -> bool:
        """Forget the weights before the last commit, or serve them again; return whether this could be done."""
        committed, self._committed = self._committed, None
        loaded = committed.loaded if committed else None
        if revert and loaded:
            loaded.switch()
            self._synchronize()
        if loaded:
            loaded.free()
        return loaded is not None or not revert

    def untouched(self) -> list[str]:
        """The parameters of the model that the last commit brought no tensor for."""
        return self._untouched

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def leave_broadcasts(self) -> None:
        if self._receiver is not None:
            self._receiver.leave_broadcasts()

    def shutdown(self) -> None:
        """Close the receiver and unpin in the background, after a running stage, which ends by its own deadline."""
        if self._receiver is not None:
            self._background.submit(self._receiver.close)
        if self._memory is not None:
            self._background.submit(self._memory.pinning.end)
        self._receiver = self._memory = None
        self._background.shutdown(wait=False)


class StagingWorker:
    """The method that `worker_extension_cls` adds to vLLM's worker, for calls by `collective_rpc`."""

    weight_transfer_engine: StagedTransferEngine

    def transfer(self, method: str, *args: Any) -> Any:
        """Call a method of the worker's StagedTransferEngine."""
        return getattr(self.weight_transfer_engine, method)(*args)


def keeps_addresses(device: torch.device) -> bool:
    """Whether a model's tensors must stay where they are: CUDA graphs contain their addresses."""
    return device.type != "cpu"


def _tied(model_config: Any) -> bool:
    """Whether the output layer is the embedding matrix."""
    # Of some vision-language models only the whole configuration says so, and not that of its text.
    text = model_config.hf_text_config
    return bool((text if hasattr(text, "tie_word_embeddings") else model_config.hf_config).tie_word_embeddings)


WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
