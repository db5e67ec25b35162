"""`python -m tests.tools.plan.fake_shared_step CONFIG RANKS ...`: steps of the learner on a fake GPU, as lines of JSON.

The first configuration makes two. The micro-batches of its first step are full of separate sequences, those of the
second of siblings that share three quarters of their tokens. `learner_step` makes the others.
"""

from slipstream.tools.plan import learner_step  # isort: skip - it loads the fake device, which has to come before torch

import sys

import msgspec
import numpy as np

from slipstream.common.config.config import Config, load_config
from slipstream.learner.batch.pack import Packed, micro_batches
from slipstream.tools.plan.full_pack import made_sequence


def shared_pack(config: Config) -> Packed:
    packs: list[Packed] = []
    most = config.learner.micro_batch_tokens
    for number in range(2, 1000):
        siblings = [made_sequence(config.model.max_tokens, config) for _ in range(number)]
        for place, each in enumerate(siblings):
            each.tokens[len(each.tokens) * 3 // 4 :] = np.int32(place)
        found = micro_batches(siblings, max_tokens=most, num_ranks=1, rank=0, share_prefixes=True)
        if len(found) > 1:
            break
        packs = found
    return packs[0]


def main() -> None:
    path, num_ranks, *sys.argv[1:] = sys.argv[1:]
    for packed in (None, shared_pack(load_config(path, []))):
        measured = learner_step.measure_step(load_config(path, []), num_ranks=int(num_ranks), packed=packed)
        print(msgspec.json.encode(measured).decode(), flush=True)
    learner_step.main()


if __name__ == "__main__":
    main()
