"""The shadow model on a GPU: made once if there is memory, loaded in the background, exchanged at a commit."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.actors.engine.attributes import attributes_of, changed_attribute, derived_tensor
from slipstream.actors.engine.exchange import Unpaired, exchange, pieces_of, storages_of
from slipstream.actors.engine.reload import Loaded, forget_reload, reload, reloadable_shadow
from slipstream.actors.engine.shadow_memory import GIB, lacks

log = logging.getLogger(__name__)


def memory_of(device: torch.device) -> tuple[int, int]:
    """The free and the total bytes of a GPU."""
    return torch.cuda.mem_get_info(device)


class KeptShadow:
    """Owns the shadow model and the stream that loads it. Only one thread, in the background, may call `load`.

    If it has no room, or vLLM keeps weights of this model where an exchange does not reach them, there is none: the
    caller then loads in the pause. The log says why, once.
    """

    def __init__(self, model: nn.Module, model_config: Any, *, device: torch.device, room_bytes: int) -> None:
        """`room_bytes` are what the engine left to a shadow at its start; 0: it takes what others have left free."""
        self._model = model
        self._model_config = model_config
        self._device = device
        self._room_bytes = room_bytes
        # On the default stream each copy would wait for what the engine computes.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._shadow: nn.Module | None = None
        self._lost = False  # the last shadow, whose load failed
        self._impossible = False

    def load(self, tensors: dict[str, torch.Tensor], *, has_committed: bool) -> Loaded | None:
        """Load `tensors` into the shadow, and wait for the copies; None if there is no shadow.

        `has_committed` says whether the engine has ever taken weights that were published to it. Before that, a learner
        on the same GPU has made no step, and more is free than it will leave.
        """
        if self._impossible:
            return None
        if not self._room_bytes and not has_committed:
            log.info(
                "the first version is loaded while nothing is generated; then it is known if a shadow model has room"
            )
            return None
        try:
            return self._loaded(tensors)
        except (Unpaired, torch.OutOfMemoryError) as error:
            why = str(error)
        self._give_up(why)  # not above: the exception refers to the shadow, whose memory would stay
        return None

    def _loaded(self, tensors: dict[str, torch.Tensor]) -> Loaded | None:
        shadow, self._shadow = self._shadow or self._new(), None  # it is not kept if its load fails
        if shadow is None:
            return None
        before = attributes_of(shadow)
        try:
            with self._beside():
                untouched = reload(shadow, tensors, self._model_config)
                if (name := changed_attribute(before, shadow)) is not None:
                    raise Unpaired(f"vLLM keeps weights of this model in {name}, outside of its tensors")
            loaded = Loaded(switch=partial(exchange, pieces_of(self._model, shadow)), untouched=untouched)
        except BaseException:
            forget_reload(shadow)
            self._lost = True
            raise
        self._shadow = shadow
        return loaded

    def _new(self) -> nn.Module | None:
        """A new shadow; None if it has no room, or an exchange would not reach all weights."""
        if self._lost:
            self._free_lost()
        shadow_bytes = sum(storage.nbytes() for storage in storages_of(self._model).values())
        free, total = memory_of(self._device)
        why = lacks(shadow_bytes, room_bytes=self._room_bytes, free_bytes=free, total_bytes=total)
        if why is None and (name := derived_tensor(self._model)) is not None:
            why = f"vLLM derives {name} from the weights, outside of the model's tensors"
        if why is not None:
            self._give_up(why)
            return None
        with self._beside():
            shadow = reloadable_shadow(self._model)
        log.info(
            "new weights are loaded beside those that serve: a shadow model of %.1f GiB; %.1f of %.1f GiB were free",
            *(num_bytes / GIB for num_bytes in (shadow_bytes, free, total)),
        )
        return shadow

    def _give_up(self, why: str) -> None:
        self._impossible = True
        log.warning("new weights are loaded while nothing is generated, and a refused version ends the actor: %s", why)
        if self._room_bytes:
            log.warning(
                "%.1f GiB that the engine left to a shadow model stay unused; actors.kv_cache_bytes can give them away",
                self._room_bytes / GIB,
            )
        if self._lost:
            self._free_lost()

    def _free_lost(self) -> None:
        """Free the memory of a shadow whose load failed: it refers to itself, and the allocator would keep it."""
        gc.collect()
        if self._stream is not None:
            torch.cuda.empty_cache()
        self._lost = False

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the stream of its own, and wait for it at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
