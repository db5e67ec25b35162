"""`slipstream replay audit`: count every group and trajectory again and compare with the books."""

from common.config import Config
from replay.audit import audit as contradictions_of
from replay.ledger import read_ledger
from tools.run_client import client_of
from tools.table import print_table


def audit(config: Config) -> int:
    """Print the ledger of every stream; return 0 when all of them balance and hold up to the recount, else 1."""
    client = client_of(config)
    num_wrong = 0
    for stream in ("train", "eval"):
        ledger = read_ledger(client, config.run.name, stream=stream)
        contradictions = contradictions_of(client, config.run.name, stream=stream)
        if not ledger.balanced:
            contradictions.append("the counters do not balance")
        print_table(f"{config.run.name}: {stream}", {name: str(value) for name, value in ledger.to_dict().items()})
        for contradiction in contradictions:
            print(f"WRONG {contradiction}")
        num_wrong += len(contradictions)
    return 1 if num_wrong else 0
