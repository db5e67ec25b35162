"""`slipstream replay audit`: recount every group and trajectory, and compare with the ledger."""

from slipstream.common.config.config import Config
from slipstream.common.process.printable import printable
from slipstream.replay.buffer.audit import audit as contradictions_of
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.ledger import read_ledger
from slipstream.tools.see.run_client import client_of
from slipstream.tools.terminal.table import print_table


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
