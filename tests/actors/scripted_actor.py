"""An actor whose engine follows a script: `python -m tests.actors.scripted_actor NAME [section.key=value ...]`.

All else is an actor's: it joins, pulls and checks the model's files and every version, plays, and leaves in order.
"""

import asyncio
import dataclasses
import math
import os
import random
import re
import sys
from functools import partial

from slipstream.actors.__main__ import main
from slipstream.actors.engine.engine import Completion
from slipstream.actors.weights.pull import Puller, PullFailed, actors_puller
from slipstream.actors.weights.refused import WeightsRefused
from slipstream.common.config.config import Config
from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.chat import reply_form
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.chunks import Blob
from slipstream.common.transfer.delta import apply_delta
from slipstream.common.transfer.weights import Offer, WeightsError, anchor_blob, check_blob, deltas_from, verify
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.guess import WORDS

TOKEN_TIME_S = 0.01
PULL_S = 60.0
PRICES = {"apples": 3, "pears": 4, "plums": 7, "figs": 9}  # of two scripts in docs/examples/foreign


class PullingEngine(ScriptedEngine):
    """It stages a version as a worker of vLLM does, up to its verified bytes."""

    def __init__(self, puller: Puller, vocab_size: int, **script: object) -> None:
        super().__init__(**script)  # type: ignore[arg-type]
        self._puller = puller
        self._logprob = -math.log(vocab_size)
        self._root, self._buffer = "", bytearray()

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """The log-probabilities are those of a policy without a preference: the learner masks impossible ones."""
        completion = await super().generate(tokens, sampling, seed=seed)
        return dataclasses.replace(completion, logprobs=[self._logprob] * len(completion.tokens))

    async def stage(self, offer: Offer) -> None:
        try:
            await asyncio.to_thread(self._receive, offer)
        except (PullFailed, WeightsError) as error:
            raise WeightsRefused(str(error)) from error
        await super().stage(offer)

    def _receive(self, offer: Offer) -> None:
        manifest = offer.manifest
        deltas = deltas_from(manifest, self._root)
        if deltas is None:
            anchor = anchor_blob(manifest)
            self._buffer = bytearray(self._pull(offer, anchor))
            deltas = deltas_from(manifest, anchor.root)
        assert deltas is not None
        for delta in deltas:
            apply_delta(self._pull(offer, delta.blob), memoryview(self._buffer))
        verify(manifest, memoryview(self._buffer))
        self._root = manifest.root

    def _pull(self, offer: Offer, blob: Blob) -> memoryview:
        check = partial(check_blob, offer.manifest, blob)
        return self._puller.pull(blob, publisher=offer.pull_endpoint, check=check, timeout_s=PULL_S).data


def foreign_replies(prompt: str) -> tuple[str, str]:
    """A right and a wrong reply to the prompts of the scripts in docs/examples/foreign."""
    if places := re.findall(r"You are at (\d), the door is at (\d)", prompt):
        here, door = map(int, places[-1])
        return ("right", "left") if here < door else ("left", "right")
    if fruit := re.search(r"What do (\w+) cost\?", prompt):
        call = '{{"name": "final_answer", "arguments": {{"answer": "{}"}}}}' if "final_answer" in prompt else "{}"
        return call.format(PRICES[fruit[1]]), call.format(0)
    first, second = re.findall(r"(\d+) ?\+ ?(\d+)\?", prompt)[-1]
    return str(int(first) + int(second)), "no"


def start(name: str, *, run: Config, mine: Config, model_path: str) -> PullingEngine:
    tokenizer = load_tokenizer(model_path)
    end = reply_form(tokenizer).ends["user"]

    def write(tokens: list[int], seed: int | None) -> list[int]:
        chance = random.Random(f"{seed}/{len(tokens)}")
        if run.env.mixture:
            (reply,) = chance.choices(foreign_replies(tokenizer.decode(tokens)), (4, 1))
        else:
            reply = chance.choice(WORDS)
        return list(tokenizer.encode(reply + end, add_special_tokens=False))

    puller, schedule = actors_puller(mine.redis.url, run.run.name, actor=name), Schedule(token_time_s=TOKEN_TIME_S)
    given = {"script": write, "policy_version": -1, "schedule": schedule, "max_tokens": run.model.max_tokens}
    return PullingEngine(puller, len(tokenizer), **given)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:], lambda: start))
