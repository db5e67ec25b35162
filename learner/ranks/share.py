"""Broadcasts records between ranks, as the frames of `slipstream.common.process.wire`, never as pickles."""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from slipstream.common.process.wire import decode, encode
from slipstream.learner.ranks.ranks import Ranks

S = TypeVar("S", bound=msgspec.Struct)


def share(record: S | None, kind: type[S], *, ranks: Ranks, source: int = 0) -> S | None:
    """Return the record of rank `source` on every rank, whatever the other ranks pass. Collective."""
    if ranks.num_ranks == 1:
        return record
    frame = encode(record) if record is not None else b""
    num_bytes = torch.tensor([len(frame)], device=ranks.device)
    dist.broadcast(num_bytes, src=source)
    if int(num_bytes) == 0:
        return None
    payload = torch.empty(int(num_bytes), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == source:
        payload.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    dist.broadcast(payload, src=source)
    return decode(kind, bytes(payload.cpu().numpy()), max_bytes=len(payload))
