"""`slipstream replay failures` and `quarantined`: what went wrong last, and who sent it."""

from collections.abc import Sequence

import msgspec

from common.config import Config
from replay.ticket import Failure, Quarantined
from tools.printable import json_line
from tools.replay.edit import buffer_of
from tools.replay.run_client import shards_of
from tools.table import print_rows


def failures(config: Config, *, limit: int, stream: str, as_json: bool) -> int:
    """The last attempts that failed by no doing of the policy's, newest first in each shard."""
    shards = shards_of(config, stream=stream)
    found = [failure for shard in shards for failure in buffer_of(shard, config, stream).failures()]
    return _list(Failure, found[:limit], as_json=as_json)


def quarantined(config: Config, *, limit: int, stream: str, as_json: bool) -> int:
    """The groups that are set aside, newest first in each shard."""
    shards = shards_of(config, stream=stream)
    found = [group for shard in shards for group in buffer_of(shard, config, stream).quarantined()]
    return _list(Quarantined, found[:limit], as_json=as_json)


def _list(kind: type[msgspec.Struct], records: Sequence[msgspec.Struct], *, as_json: bool) -> int:
    """One line a record, its fields as they are named."""
    rows = [msgspec.structs.asdict(record) for record in records]
    if as_json:
        for row in rows:
            print(json_line(row))
        return 0
    columns = kind.__struct_fields__
    print_rows(columns, [["" if row[name] is None else str(row[name]) for name in columns] for row in rows])
    return 0
