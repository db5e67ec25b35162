"""Writes the rows of `slipstream replay export` to a parquet file, in batches."""

import itertools
from collections.abc import Iterable
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 256

_INTEGER, _TEXT = pa.int64(), pa.string()
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))),
        ("tools", _TEXT),  # JSON, as TRL reads it; null
        ("rewards", pa.list_(pa.struct([("turn", _INTEGER), ("name", _TEXT), ("value", pa.float64())]))),
        ("state_keys", pa.list_(_TEXT)),  # one per turn
        ("return", pa.float64()),
        ("score", pa.float64()),
        ("success", pa.bool_()),
        ("fidelity", _TEXT),
        ("segments", pa.list_(pa.struct([("kind", _TEXT), ("text", _TEXT)]))),
        ("run_id", _TEXT),
        ("task", _TEXT),
        ("group_id", _INTEGER),
        ("member", _INTEGER),
        ("attempt", _INTEGER),
        ("actor", _TEXT),
        ("state", _TEXT),
        ("step", _INTEGER),
        ("policy_versions", pa.list_(_INTEGER)),
        ("num_turns", _INTEGER),
        ("num_tokens", _INTEGER),
        ("num_branches", _INTEGER),
        ("stop_reason", _TEXT),
    ]
)


def write_parquet(file: BinaryIO, rows: Iterable[dict[str, Any]]) -> None:
    """Write `rows` to `file`, BATCH_ROWS at a time."""
    left = iter(rows)
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        while batch := list(itertools.islice(left, BATCH_ROWS)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=SCHEMA))
