"""An actor process whose engine is scripted.

`python -m slipstream.tools.lab.gpu_check.scripted_actor NAME [section.key=value ...]`. Everything but the engine is
that of `python -m slipstream.actors`. Tokens are random, and their number depends on the seed alone.
"""

import os
import random
import sys

from slipstream.actors.__main__ import main
from slipstream.common.config.config import Config
from slipstream.common.text.codec import end_tokens
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine

SCHEDULE = Schedule(prefill_s=0.05, token_time_s=0.03)


def start_scripted(name: str, *, run: Config, mine: Config, model_path: str) -> ScriptedEngine:
    """An engine that writes turns of 1 to 15 tokens, few of them long."""
    tokenizer = load_tokenizer(model_path)
    end, vocab_size = min(end_tokens(tokenizer)), len(tokenizer)

    def script(_: list[int], seed: int | None) -> list[int]:
        chance = random.Random(seed)
        num_tokens = min(15, 1 + int(chance.expovariate(0.25)))
        return [chance.randrange(10, vocab_size) for _ in range(num_tokens)] + [end]

    return ScriptedEngine(script, policy_version=-1, schedule=SCHEDULE, max_tokens=run.model.max_tokens)


if __name__ == "__main__":
    exit_code = main(sys.argv[1], sys.argv[2:], begin=lambda: start_scripted)
    os._exit(exit_code)  # as `python -m slipstream.actors` does
