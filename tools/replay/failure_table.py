"""`slipstream replay audit`, `failures` and `quarantined`: what is wrong in the books of a run, and what failed."""

from collections.abc import Sequence

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.process.printable import printable
from slipstream.replay.buffer.audit import audit as contradictions_of
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.failures import Failure, Quarantined, read_failures, read_quarantined
from slipstream.replay.records.keys import key
from slipstream.replay.records.ledger import read_ledger
from slipstream.tools.see.run_client import client_of
from slipstream.tools.terminal.output_lines import print_json
from slipstream.tools.terminal.table import print_rows, print_table


def audit(config: Config) -> int:
    """Print the ledger of every stream; return 0 if all balance and agree with the recount, else 1."""
    num_wrong, client = 0, client_of(config)
    for stream in ("train", "eval"):
        ledger = read_ledger(client, config.run.name, stream=stream)
        contradictions = contradictions_of(client, config.run.name, stream=stream)
        print_table(f"{config.run.name}: {stream}", {name: str(value) for name, value in ledger.to_dict().items()})
        for contradiction in contradictions:
            print(f"WRONG {printable(contradiction)}")
        num_wrong += len(contradictions)
    fleet = Fleet(client, config.run.name)
    fleet.everyone()
    if fleet.num_unreadable:
        print(f"WRONG {fleet.num_unreadable} records in the fleet of {config.run.name} are malformed; they are ignored")
    return 1 if num_wrong or fleet.num_unreadable else 0


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
