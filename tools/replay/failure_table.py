"""`slipstream replay failures` and `quarantined`: list failed attempts and quarantined groups, with their actors."""

from collections.abc import Sequence

import msgspec

from slipstream.common.config.config import Config
from slipstream.replay.records.failures import Failure, Quarantined, read_failures, read_quarantined
from slipstream.replay.records.keys import key
from slipstream.tools.see.run_client import client_of
from slipstream.tools.terminal.output_lines import print_json
from slipstream.tools.terminal.table import print_rows


def failures(config: Config, *, limit: int, stream: str, as_json: bool) -> int:
    """List the last attempts that failed because of an environment or the infrastructure, newest first."""
    found = read_failures(client_of(config), key(config.run.name, stream))
    return _list(Failure, found[:limit], as_json=as_json)


def quarantined(config: Config, *, limit: int, stream: str, as_json: bool) -> int:
    """List the quarantined groups, newest first."""
    found = read_quarantined(client_of(config), key(config.run.name, stream))
    return _list(Quarantined, found[:limit], as_json=as_json)


def _list(kind: type[msgspec.Struct], records: Sequence[msgspec.Struct], *, as_json: bool) -> int:
    """Print one line per record, with the names of its fields as columns."""
    rows = [msgspec.structs.asdict(record) for record in records]
    if as_json:
        return print_json(rows)
    columns = kind.__struct_fields__
    print_rows(columns, [["" if row[name] is None else str(row[name]) for name in columns] for row in rows])
    return 0
