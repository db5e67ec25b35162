"""Rank 0 talks to Redis; the other ranks hear from it what a step is made of: as frames of ours, never as pickles."""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from common.wire import decode, encode
from learner.ranks import Ranks

S = TypeVar("S", bound=msgspec.Struct)


def share(record: S | None, kind: type[S], *, ranks: Ranks) -> S | None:
    """Return on every rank what rank 0 passed; the others pass None. Collective."""
    if ranks.num_ranks == 1:
        return record
    frame = encode(record) if record is not None else b""
    num_bytes = torch.tensor([len(frame)], device=ranks.device)
    dist.broadcast(num_bytes, src=0)
    if int(num_bytes) == 0:
        return None
    payload = torch.empty(int(num_bytes), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == 0:
        payload.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    dist.broadcast(payload, src=0)
    return decode(kind, bytes(payload.cpu().numpy()), max_bytes=len(payload))
