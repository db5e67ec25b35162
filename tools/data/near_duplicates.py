"""Finds conversations that are nearly the same as an earlier one, in constant memory.

MinHash (Broder 1997, https://doi.org/10.1109/SEQUEN.1997.666900) with locality-sensitive hashing: two texts agree in
each of NUM_HASHES minima with a probability that is the Jaccard similarity of their sets of SHINGLE_WORDS words. Bands
of ROWS minima find candidates, and all minima decide.

    P(candidate at similarity s) = 1 - (1 - s^ROWS)^NUM_BANDS      0.8: 1.00    0.7: 1.00    0.5: 0.87

The newest WINDOW texts are remembered, and a slot of a band only its newest text. That is about 100 MB.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from slipstream.common.records.message import Message

SHINGLE_WORDS = 5
NUM_HASHES, ROWS = 128, 4
NUM_BANDS = NUM_HASHES // ROWS
WINDOW = 1 << 17  # texts
NUM_SLOTS = 1 << 18  # of each band
SEED = 1
_BANDS = np.arange(NUM_BANDS)


class NearDuplicates:
    """The newest texts that were no near-duplicates themselves."""

    def __init__(self, *, similarity: float) -> None:
        self._num_equal = similarity * NUM_HASHES
        random = np.random.default_rng(SEED)
        self._factors = random.integers(0, 1 << 63, size=(NUM_HASHES, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._minima = np.zeros((WINDOW, NUM_HASHES), dtype=np.uint32)
        self._newest = np.full((NUM_BANDS, NUM_SLOTS), -1, dtype=np.int32)  # the newest text of each slot
        self._num_texts = 0

    def add(self, messages: Iterable[Message]) -> bool:
        """Remember the text of `messages` and return True; False if it is nearly that of an earlier one."""
        shingles = shingle_hashes(message.content for message in messages if message.role != "system")
        minima: npt.NDArray[np.uint32] = ((shingles * self._factors) >> np.uint64(32)).astype(np.uint32).min(axis=1)
        slots = [xxhash.xxh3_64_intdigest(band.tobytes()) % NUM_SLOTS for band in minima.reshape(NUM_BANDS, ROWS)]
        candidates = np.unique(self._newest[_BANDS, slots])
        agreeing = (self._minima[candidates[candidates >= 0]] == minima).sum(axis=1)
        if (agreeing >= self._num_equal).any():
            return False
        place = self._num_texts % WINDOW
        self._minima[place] = minima
        self._newest[_BANDS, slots] = place
        self._num_texts += 1
        return True


def shingle_hashes(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    """A hash of each run of SHINGLE_WORDS words; of all words together if there are fewer."""
    words = np.array(
        [xxhash.xxh3_64_intdigest(word) for text in texts for word in text.encode(errors="replace").split()],
        dtype=np.uint64,
    )
    length = min(SHINGLE_WORDS, max(1, len(words)))
    if not len(words):
        words = np.zeros(1, dtype=np.uint64)
    count = len(words) - length + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(length):  # Horner's rule modulo 2^64, with an odd factor
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    return hashes ^ (hashes >> np.uint64(31))
