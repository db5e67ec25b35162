"""Shares records and refusals between ranks, as the frames of `slipstream.common.process.wire`, never as pickles."""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import decode, encode
from slipstream.learner.ranks.ranks import Ranks

S = TypeVar("S", bound=msgspec.Struct)


class _Refusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str


def share(record: S | None, kind: type[S], *, ranks: Ranks, source: int = 0) -> S:
    """Return the record of rank `source` on every rank, whatever the other ranks pass. Collective."""
    frame = b""
    if ranks.rank == source:
        assert record is not None
        if ranks.num_ranks == 1:
            return record
        frame = encode(record)
    num_bytes = torch.tensor([len(frame)], device=ranks.device)
    dist.broadcast(num_bytes, src=source)
    payload = torch.empty(int(num_bytes), dtype=torch.uint8, device=ranks.device)
    if ranks.rank == source:
        payload.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    dist.broadcast(payload, src=source)
    return decode(kind, bytes(payload.cpu().numpy()), max_bytes=len(payload))


def refuse_together(reason: str, *, ranks: Ranks, cause: Exception | None = None) -> None:
    """Raise ConfigError on every rank unless `reason` is empty on all, with that of the first rank. Collective.

    So no rank waits for one that has failed. `cause` is this rank's error.
    """
    first = torch.tensor(ranks.rank if reason else ranks.num_ranks, device=ranks.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if int(first) < ranks.num_ranks:
        refusal = share(_Refusal(reason=reason), _Refusal, ranks=ranks, source=int(first))
        raise ConfigError(refusal.reason) from cause
