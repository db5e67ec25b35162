"""Whether a shadow model has room beside a KV cache, with its numbers."""

import doctest

from slipstream.actors.engine import shadow_memory
from slipstream.actors.engine.shadow_memory import GIB, lacks, room_for_shadow

H100 = 80 * GIB
SEVEN_B, FOURTEEN_B = 15 * GIB, 29 * GIB


def room(weights_bytes: int, *, share_bytes: int = 72 * GIB) -> int:
    """By default of 0.9 of an H100."""
    return room_for_shadow(share_bytes=share_bytes, weights_bytes=weights_bytes, episode_bytes=GIB)


def test_an_engine_leaves_room_if_its_kv_cache_keeps_half() -> None:
    assert room(SEVEN_B) == 17 * GIB  # beside the weights and the reserve it has 54 GiB for keys and values
    assert room(FOURTEEN_B) == 0  # of 40, 31 would be the shadow's
    limit = (72 - 3 - 2 * 2) * GIB // 3  # the KV cache keeps half, exactly
    assert room(limit) == limit + 2 * GIB
    assert room(limit + 1) == 0
    assert room(SEVEN_B, share_bytes=20 * GIB) == 0


def test_a_shadow_that_the_engine_left_room_for_needs_that_to_be_free() -> None:
    def why(free: int) -> str | None:
        return lacks(SEVEN_B, room_bytes=17 * GIB, free_bytes=free, total_bytes=H100)

    assert why(17 * GIB) is None
    refused = why(13 * GIB)
    assert "needs 17.0 GiB, and 13.0 GiB of 80.0 GiB are free" in refused
    assert "lower actors.gpu_memory_utilization by 0.06 or actors.kv_cache_bytes by 4294967296" in refused


def test_without_room_of_its_own_a_shadow_leaves_a_tenth_of_the_gpu_to_others() -> None:
    assert lacks(SEVEN_B, room_bytes=0, free_bytes=25 * GIB, total_bytes=H100) is None
    assert lacks(SEVEN_B, room_bytes=0, free_bytes=25 * GIB - 1, total_bytes=H100) is not None


def test_the_examples_are_right() -> None:
    assert doctest.testmod(shadow_memory).failed == 0
