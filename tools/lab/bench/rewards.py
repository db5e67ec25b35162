"""`make bench-rewards`: values per second that `slipstream serve-rewards` gives, in batches and one at a time.

The server is a process with the quickstart's tiny model and a random score head. Episodes are random tokens in four
turns. One process asks, over HTTP: 64 requests at a time, one at a time; and a model in its own process, as `collect`
does with a folder, 64 at a time.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.common.config.config import Config, load_config
from slipstream.common.records.reward_protocol import PROCESS, ScoredEpisode
from slipstream.common.records.trajectory import pack_tokens
from slipstream.common.text.tokenizer import load_tokenizer, text_root
from slipstream.envhub.rewards.reward_client import RewardClient
from slipstream.learner.credit.score import load_scorer
from slipstream.learner.model.packed_model import ModelSettings, load_kind
from slipstream.learner.model.reward_model import RewardModel, save_reward_model
from slipstream.learner.ranks.ranks import Ranks, join_ranks
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.benchmark import Row
from slipstream.tools.play.state_values import Batches
from slipstream.tools.run.tiny_model import make_tiny_model

NUM_EPISODES, AT_A_TIME = 512, 64
NUM_ALONE = 128  # episodes that are asked for one at a time
LENGTHS = (64, 256)  # tokens of an episode, from the first to the second
NUM_TURNS = 4
NUM_REPEATS = 5
MAX_TOKENS = 1024
START_S = 120.0
SETTINGS = [f"model.max_tokens={MAX_TOKENS}", "model.dtype=float32", "learner.micro_batch_tokens=2048"]

Ask = Callable[[ScoredEpisode], Awaitable[object]]


def main() -> int:
    """Measure, print, and write docs/benchmarks/rewards.json; return 0 if every goal holds."""
    measuring, ranks = benchmark.Run("rewards"), join_ranks(timeout_s=600)
    with tempfile.TemporaryDirectory() as name:
        config = load_config(None, [f"model.path={name}/model", *SETTINGS])
        folder = reward_model(config, Path(name), ranks)
        scorer = load_scorer(
            folder,
            policy=Path(config.model.path),
            settings=ModelSettings.of(config).frozen(),
            micro_batch_tokens=config.learner.micro_batch_tokens,
            ranks=ranks,
        )
        episodes = random_episodes(scorer.model.vocab_size)
        with server(folder) as url:
            ask = RewardClient(url=url, reads=text_root(load_tokenizer(folder))).values
            asyncio.run(rate(ask, episodes[:AT_A_TIME], at_a_time=AT_A_TIME))
            together, alone, here = [], [], []
            for _ in range(NUM_REPEATS):
                together.append(asyncio.run(rate(ask, episodes, at_a_time=AT_A_TIME)))
                alone.append(asyncio.run(rate(ask, episodes[:NUM_ALONE], at_a_time=1)))
                here.append(asyncio.run(rate(Batches(scorer.values).values, episodes, at_a_time=AT_A_TIME)))
    rows = [
        Row.of(
            f"served, {AT_A_TIME} requests at a time, beside one at a time",
            together,
            unit="episodes/s",
            against=alone,
            goal="ratio >= 1.5",
        ),
        Row.of(
            f"served, {AT_A_TIME} requests at a time, beside the model in the process that asks",
            together,
            unit="episodes/s",
            against=here,
        ),
    ]
    return measuring.end(rows, versions={"torch": str(torch.__version__)})


def reward_model(config: Config, folder: Path, ranks: Ranks) -> Path:
    """A tiny policy at `config.model.path`; return the folder of a process reward model of its size."""
    policy = Path(config.model.path)
    words = " ".join(f"w{number}" for number in range(500))
    make_tiny_model(policy, texts=[words], config=config.model.tiny, max_tokens=MAX_TOKENS, seed=0)
    model = load_kind(RewardModel, policy, ranks=ranks, settings=ModelSettings.of(config).frozen())
    torch.manual_seed(0)
    with torch.no_grad():
        model.score.weight.normal_()
    save_reward_model(model, folder / "process", kind=PROCESS, ranks=ranks)
    return folder / "process"


def random_episodes(vocab_size: int) -> list[ScoredEpisode]:
    dice, episodes = np.random.default_rng(0), []
    for _ in range(NUM_EPISODES):
        num_tokens = int(dice.integers(*LENGTHS))
        stops = [num_tokens * (turn + 1) // NUM_TURNS for turn in range(NUM_TURNS)]
        tokens = pack_tokens(dice.integers(0, vocab_size, num_tokens).tolist())
        episodes.append(ScoredEpisode(tokens=tokens, turn_stops=stops, branch_starts=[0]))
    return episodes


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "slipstream.tools.cli.cli",
        "serve-rewards",
        str(folder),
        *SETTINGS,
        "--port=0",
    ]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"serving .* at (http://[0-9.:]+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


async def rate(ask: Ask, episodes: Sequence[ScoredEpisode], *, at_a_time: int) -> float:
    """Episodes per second."""
    room = asyncio.Semaphore(at_a_time)

    async def one(episode: ScoredEpisode) -> None:
        async with room:
            await ask(episode)

    started = time.perf_counter()
    await asyncio.gather(*map(one, episodes))
    return len(episodes) / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
