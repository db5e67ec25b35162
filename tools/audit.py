"""`slipstream replay audit`: count every group and trajectory again and compare with the books."""

from common.config import Config, ConfigError
from common.connection import check_servers, connect_shards
from replay.fleet import Fleet
from replay.shards import audit_shards, read_shards
from tools.table import print_table


def audit(config: Config) -> int:
    """Print the ledger of every stream; return 0 when all of them balance and hold up to the recount, else 1."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; say which Redis the run is on, as in redis.url=redis://host:6379")
    check_servers(config.redis.url, config.redis.shards)
    shards = connect_shards(config.redis.url, config.redis.shards)
    Fleet(shards[0], config.run.name).run_facts()  # raises UnknownRun
    num_wrong = 0
    for stream in ("train", "eval"):
        clients = shards if stream == "train" else shards[:1]
        ledger = read_shards(clients, config.run.name, stream=stream)
        contradictions = audit_shards(clients, config.run.name, stream=stream)
        if not ledger.balanced:
            contradictions.append("the counters do not balance")
        print_table(f"{config.run.name}: {stream}", {name: str(value) for name, value in ledger.to_dict().items()})
        for contradiction in contradictions:
            print(f"WRONG {contradiction}")
        num_wrong += len(contradictions)
    return 1 if num_wrong else 0
