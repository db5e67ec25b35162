"""The rows of an export as parquet: the same rows, with types of their own, a few in memory at a time."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.tools.data.parquet_rows import BATCH_ROWS, SCHEMA, write_parquet
from tests.tools.replay.inspected import Inspected


def test_parquet_holds_the_same_rows_as_jsonl_in_nested_lists_and_numbers(inspected: Inspected) -> None:
    inspected.filled(1, 2, heard="漢\x00\x1b[2J")
    inspected.fill(members=(1,))
    inspected("export", str(inspected.root / "rows.parquet"))
    inspected("export", str(inspected.root / "rows.jsonl"))
    lines = (inspected.root / "rows.jsonl").read_text().splitlines()
    assert pq.read_table(inspected.root / "rows.parquet").to_pylist() == [json.loads(line) for line in lines]
    schema = pq.read_schema(inspected.root / "rows.parquet")
    assert schema.names == SCHEMA.names
    message = schema.field("messages").type.value_type
    assert [(field.name, field.type) for field in message] == [("role", pa.string()), ("content", pa.string())]
    assert schema.field("policy_versions").type == pa.list_(pa.int64())
    assert schema.field("return").type == pa.float64() and schema.field("success").type == pa.bool_()


def test_a_long_export_is_written_in_batches(inspected: Inspected, tmp_path: Path) -> None:
    inspected.filled(1)
    inspected("export", str(inspected.root / "rows.jsonl"))
    row = json.loads((inspected.root / "rows.jsonl").read_text().splitlines()[0])
    write_parquet(tmp_path / "many.parquet", (row | {"member": member} for member in range(2 * BATCH_ROWS + 1)))
    many = pq.ParquetFile(tmp_path / "many.parquet")
    assert [many.metadata.row_group(group).num_rows for group in range(3)] == [BATCH_ROWS, BATCH_ROWS, 1]
    assert many.read(["member"]).column(0).to_pylist() == list(range(2 * BATCH_ROWS + 1))
