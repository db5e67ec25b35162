"""Whether a GPU has room for a shadow model of an engine beside its KV cache.

Engines are sized by it at their start, and `slipstream plan` counts by it.
"""

GIB = 1 << 30
ENGINE_RESERVE_BYTES = 3 * GIB  # estimate: CUDA's context, CUDA graphs, and the activations of a prefill
# Estimate: a layer is loaded into memory of its own before it is copied to its place; the embedding of a 7B has 1.1 GB.
SHADOW_WORK_BYTES = 2 * GIB
MARGIN = 0.1  # the share of a GPU that stays free if a shadow is not part of the engine's share


def room_for_shadow(*, share_bytes: int, weights_bytes: int, episode_bytes: int) -> int:
    """The bytes of its share of a GPU that an engine leaves to a shadow model.

    All that a shadow needs if the KV cache then keeps at least half of what it would have had, and has room for an
    episode at its longest, `episode_bytes`; else 0.

    >>> [
    ...     room_for_shadow(share_bytes=72 * GIB, weights_bytes=weights * GIB, episode_bytes=episode * GIB) // GIB
    ...     for weights, episode in ((15, 7), (30, 7), (15, 40))
    ... ]
    [17, 0, 0]
    """
    shadow_bytes = weights_bytes + SHADOW_WORK_BYTES
    kv_bytes = share_bytes - weights_bytes - ENGINE_RESERVE_BYTES
    return shadow_bytes if max(shadow_bytes, episode_bytes) <= kv_bytes - shadow_bytes else 0


def needed_bytes(shadow_bytes: int, *, room_bytes: int, total_bytes: int) -> int:
    """What must be free for a shadow of `shadow_bytes`; more, if it takes what others left."""
    return shadow_bytes + SHADOW_WORK_BYTES + (0 if room_bytes else int(MARGIN * total_bytes))


def lacks(shadow_bytes: int, *, room_bytes: int, free_bytes: int, total_bytes: int) -> str | None:
    """Why a shadow of `shadow_bytes` has no room on a GPU of `total_bytes`, and what to set; None if it has."""
    needed = needed_bytes(shadow_bytes, room_bytes=room_bytes, total_bytes=total_bytes)
    if needed <= free_bytes:
        return None
    short = needed - free_bytes
    share = short / total_bytes + 0.005
    return (
        f"a shadow model needs {needed / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB of {total_bytes / GIB:.1f} GiB "
        f"are free; for one, lower actors.gpu_memory_utilization by {share:.2f} or actors.kv_cache_bytes by {short}, "
        "or raise actors.tensor_parallel"
    )
