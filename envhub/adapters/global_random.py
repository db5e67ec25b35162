"""Libraries that draw from the process's own generators: each episode gets its own, and nobody else's are touched."""

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_IN_USE = threading.Lock()


class GlobalChance:
    """What `random` and `numpy.random` hold while one episode's code runs, and hold again when it goes on.

    Only one thread at a time is within any of them. Who draws from the process's generators without one, in another
    thread, is not held back.
    """

    def __init__(self, seed: int) -> None:
        """`seed` has 32 bits at most."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        with _IN_USE:
            outer_python, outer_numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(outer_python)
                np.random.set_state(outer_numpy)
