"""Give each episode its own state of Python's and NumPy's global random generators."""

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_IN_USE = threading.Lock()


class GlobalRandom:
    """The state of `random` and `numpy.random` for one episode, which is kept between its turns.

    Only one thread at a time can enter `within`. Code that uses the global generators outside it, in another thread,
    would take numbers from the episode: siblings would get different tasks. So our own code uses other generators.
    """

    def __init__(self, seed: int) -> None:
        """`seed` has 32 bits at most."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Run a block with the episode's state, and restore the previous state after it."""
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
