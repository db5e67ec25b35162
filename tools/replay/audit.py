"""`slipstream replay audit`: count every group and trajectory again and compare with the books."""

from common.config import Config
from replay.shards import audit_shards, read_shards
from tools.replay.run_client import shards_of
from tools.table import print_table


def audit(config: Config) -> int:
    """Print the ledger of every stream; return 0 when all of them balance and hold up to the recount, else 1."""
    num_wrong = 0
    for stream in ("train", "eval"):
        clients = [shard.client for shard in shards_of(config, stream=stream)]
        ledger = read_shards(clients, config.run.name, stream=stream)
        contradictions = audit_shards(clients, config.run.name, stream=stream)
        print_table(f"{config.run.name}: {stream}", {name: str(value) for name, value in ledger.to_dict().items()})
        for contradiction in contradictions:
            print(f"WRONG {contradiction}")
        num_wrong += len(contradictions)
    return 1 if num_wrong else 0
