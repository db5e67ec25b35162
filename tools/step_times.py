"""Where the time of one optimizer step goes, seen from outside."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from learner import step as step_module
from learner.model import PackedModel

T = TypeVar("T")


class StepTimes:
    """Wall clock of the parts of one step, which add up to all of it: what no part claims is the rest."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self._times_s: defaultdict[str, float] = defaultdict(float)
        self._begun = _now()
        self._forward_begun = self._begun

    def timed(self, part: str, work: Callable[[], T]) -> T:
        """Do `work`, and count its time as `part`."""
        started = _now()
        result = work()
        self._times_s[part] += _now() - started
        return result

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within it forward passes, backward passes and the update of `train_step` are timed."""
        backward, apply_gradient = step_module.backward, step_module.apply_gradient
        hooks = [
            # Around FSDP's own, which gather weights.
            self._model.register_forward_pre_hook(lambda *_: self._forward_begins(), prepend=True),
            self._model.register_forward_hook(lambda *_: self._forward_ends()),
        ]
        step_module.backward = self._wrapped("backward", backward)
        step_module.apply_gradient = self._wrapped("optimizer", apply_gradient)
        try:
            yield
        finally:
            step_module.backward, step_module.apply_gradient = backward, apply_gradient
            for hook in hooks:
                hook.remove()

    def split(self) -> dict[str, float]:
        """Seconds of every part since this was made, and of the rest."""
        whole_s = _now() - self._begun
        parts = ("pack", "forward", "backward", "optimizer", "publish copy")
        split = {part: self._times_s[part] for part in parts}
        return split | {"rest": whole_s - sum(split.values())}

    def _forward_begins(self) -> None:
        self._forward_begun = _now()

    def _forward_ends(self) -> None:
        self._times_s["forward"] += _now() - self._forward_begun

    def _wrapped(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        return lambda *args, **kwargs: self.timed(part, lambda: function(*args, **kwargs))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
