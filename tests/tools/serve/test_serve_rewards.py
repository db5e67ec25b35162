"""`slipstream serve rewards`: one copy of a reward model for many processes, which may be killed at any moment."""

import asyncio
import io
import json
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.actors.search.episode_tree import Collected, EpisodeTree
from slipstream.actors.search.tree_search import START
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.reward_protocol import (
    MAX_REQUEST_BYTES,
    PROCESS,
    RewardModelCard,
    ScoredEpisode,
    ValuesRequest,
)
from slipstream.common.records.trajectory import Outcome, StopReason, Task, Trajectory, pack_tokens
from slipstream.common.text.tokenizer import load_tokenizer, text_root
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.part import parts_of, read_as
from slipstream.envhub.rewards.reward_client import RewardClient
from slipstream.learner.credit.score import RewardScorer, load_scorer
from slipstream.learner.model.packed_model import ModelSettings, load_kind
from slipstream.learner.model.reward_model import RewardModel, save_reward_model
from slipstream.learner.objective.turn_labels import progress
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.evaluate import evaluate_on
from slipstream.tools.play.state_values import Batches, Numbers, reward_model_beside, scored_here
from slipstream.tools.serve.reward_server import RewardServer
from tests.actors.episode.episodes import attempt_on, rollout_of
from tests.guess import GuessEnv
from tests.processes import CLI, Process
from tests.tools.play.test_prm import TURNS, collected, config_of, stage_on
from tests.waiting import wait_until

Score = Callable[[Sequence[ScoredEpisode]], list[Numbers]]
KEY = "a-key-of-mine"
SEARCH = {"search": "tree_of_thoughts", "width": 3, "num_tasks": 12}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return config_of(tmp_path_factory.mktemp("served"), "env.options.worth=0.0")


@pytest.fixture(scope="module")
def scorer(config: Config, ranks: Ranks) -> RewardScorer:
    """Of a model with a random head, in a folder as `slipstream fit prm` writes it."""
    policy, settings = Path(config.model.path), ModelSettings.of(config).frozen()
    model = load_kind(RewardModel, policy, ranks=ranks, settings=settings)
    torch.manual_seed(7)
    with torch.no_grad():
        model.score.weight.to_local().copy_(torch.randn(1, 32))
    folder = policy.with_name("process")
    save_reward_model(model, folder, kind=PROCESS, ranks=ranks)
    return load_scorer(folder, policy=policy, settings=settings, micro_batch_tokens=1024, ranks=ranks)


@contextmanager
def served(folder: Path, log: Path, *, port: int = 0) -> Iterator[tuple[Process, str]]:
    settings = ["model.max_tokens=64", "model.dtype=float32", "learner.micro_batch_tokens=1024", f"--port={port}"]
    command = [sys.executable, *CLI, "serve", "rewards", str(folder), *settings]
    process = Process("rewards", command, log=log, environment={"SLIPSTREAM_REWARDS_KEY": KEY})

    def url() -> str:
        assert process.exit_code is None, process.last_words()
        found = re.search(r"serving .* at (\S+)", process.said())
        return found[1] if found else ""

    try:
        wait_until(lambda: bool(url()), "the server of rewards")
        yield process, url()
    finally:
        if process.exit_code is None:
            process.kill()


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


@pytest.mark.long
def test_a_search_goes_on_when_the_server_is_killed_and_started_again(
    config: Config, scorer: RewardScorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = collected(stage_on(config, tmp_path), config, tmp_path / "a.jsonl", scored_here(scorer), **SEARCH)
    folder = scorer.model.folder
    with served(folder, tmp_path / "first.log") as (first, url):
        monkeypatch.setenv("SLIPSTREAM_REWARDS_KEY", "another")
        with (
            pytest.raises(ConfigError, match=r"refuses with status 401.*; set SLIPSTREAM_REWARDS_KEY to its key"),
            reward_model_beside(config, url),
        ):
            pass
        monkeypatch.setenv("SLIPSTREAM_REWARDS_KEY", KEY)
        with reward_model_beside(config, url) as values, ThreadPoolExecutor() as pool:
            # One after another: each writes the tokenizer.
            stages = [(stage_on(config, tmp_path), tmp_path / name) for name in ("b.jsonl", "c.jsonl")]
            collecting = [pool.submit(collected, stage, config, path, values, **SEARCH) for stage, path in stages]
            wait_until(lambda: health(url)["scored"] >= 20, "values")
            first.kill()
            with served(folder, tmp_path / "second.log", port=int(url.rpartition(":")[2])) as (second, _):
                found = [each.result(120) for each in collecting]
                assert health(url)["scored"] > 0
                second.send(signal.SIGINT)
                assert second.wait() == 130
    said = [[row["messages"] for row in rows] for rows in (wanted, *found)]
    assert said[0] == said[1] == said[2] and len(said[0]) > 12
    assert KEY not in first.said() + second.said() and "Traceback" not in second.said()


async def played(config: Config, folder: Path, number: int) -> list[ScoredEpisode]:
    found, room, stage = Collected(), asyncio.Semaphore(4), stage_on(config, folder)
    for index in range(number):
        tree = EpisodeTree(attempt(config, index), setup=stage, room=room, collected=found)
        await tree.play_out(START, max_turns=TURNS)
    return [ScoredEpisode.of(each) for each in found.trajectories]


def attempt(config: Config, index: int) -> Attempt:
    return replace(attempt_on(), task=Task(env=config.env.name, split="train", index=index), group_id=index)


@asynccontextmanager
async def listening(scorer: RewardScorer, score: Score | None = None, *, model: str = "a") -> AsyncIterator[str]:
    card = RewardModelCard(kind=scorer.model.kind, model=model, reads=reads(scorer), max_tokens=64)
    batches = Batches(score or scorer.values)
    server = RewardServer(batches, card, vocab_size=scorer.model.vocab_size, secret="")
    async with server.listening("127.0.0.1", 0) as url:
        yield url


def reads(scorer: RewardScorer) -> str:
    return text_root(load_tokenizer(scorer.model.folder))


def malformed(good: ValuesRequest, vocab_size: int) -> dict[str, bytes]:
    """Bodies that are no request, by what is wrong."""
    encode, changed = msgspec.msgpack.encode, msgspec.structs.replace

    def other(**changes: Any) -> bytes:
        return encode(changed(good, episode=changed(good.episode, **changes)))

    num_tokens = len(good.episode.tokens) // 4
    return {
        "is malformed": b"values",
        "truncated": b"",
        "Expected": encode([1, 2]),
        "unknown field `a`": b"\x81\xa1a" * 20_000,
        "unknown field `and`": encode({"reads": good.reads, "episode": good.episode, "and": 1}),
        "positive multiple": other(tokens=b"abc"),
        "vocabulary is": other(tokens=pack_tokens([vocab_size] * num_tokens)),
        r"token ids in \[-1, -1\], vocabulary is": other(tokens=pack_tokens([-1] * num_tokens)),
        "do not divide": other(branch_starts=[0, num_tokens]),
        "branch_starts": other(branch_starts=[1]),
        "not in order": other(turn_stops=[5, 3]),
        "or not in": other(turn_stops=[num_tokens + 1]),
        "no prompt": other(turn_stops=[1]),
        "a sequence has 70 tokens": other(tokens=pack_tokens([1] * 70), turn_stops=[70]),
        "length": other(turn_stops=[]),
    }


async def test_garbage_is_refused_and_the_server_goes_on(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    (episode,) = await played(config, tmp_path, 1)
    good = ValuesRequest(reads=reads(scorer), episode=episode)
    async with listening(scorer) as url, aiohttp.ClientSession() as session:

        async def answer(body: bytes, **headers: str) -> tuple[int, str]:
            async with session.post(f"{url}/v1/values", data=io.BytesIO(body), headers=headers) as response:
                return response.status, (await response.read()).decode(errors="replace")

        for reason, body in malformed(good, scorer.model.vocab_size).items():
            status, text = await answer(body)
            assert status == 400 and re.search(reason, text), (reason, status, text)
        assert (await answer(bytes(MAX_REQUEST_BYTES + 1)))[0] == 413
        whole = msgspec.msgpack.encode(good)
        assert (await answer(whole, Origin="http://elsewhere"))[0] == 403
        status, text = await answer(msgspec.msgpack.encode(msgspec.structs.replace(good, reads="another")))
        assert status == 409 and "another" not in text and "train one from a model of the same family" in text
        assert (await answer(whole))[0] == 200


async def test_callers_that_leave_or_wait_long_harm_none(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    episodes = await played(config, tmp_path, 4)
    wanted = [each.tolist() for each in scorer.values(episodes)]
    gate, begun = threading.Event(), threading.Event()

    def score(batch: Sequence[ScoredEpisode]) -> list[Numbers]:
        begun.set()
        assert gate.wait(60)
        return scorer.values(batch)

    async with listening(scorer, score) as url:
        client = RewardClient(url=url, reads=reads(scorer))
        leaves = asyncio.create_task(client.values(episodes[0]))
        await asyncio.to_thread(begun.wait, 60)
        others = [asyncio.create_task(client.values(each)) for each in episodes[1:]]
        leaves.cancel()
        hasty = RewardClient(url=url, reads=reads(scorer), deadline_s=0.2)
        with pytest.raises(EnvError, match=r"no answer from .* within 0.2 s \(deadline_s\): no reply yet"):
            await hasty.values(episodes[0])
        gate.set()
        found = [reply.values for reply in await asyncio.gather(*others)]
    assert np.allclose(found, wanted[1:], rtol=1e-5)


async def test_an_episode_without_a_score_fails_no_other(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    first, culprit, *others = await played(config, tmp_path, 4)
    sizes = list[int]()

    def score(batch: Sequence[ScoredEpisode]) -> list[Numbers]:
        sizes.append(len(batch))
        if culprit in batch:
            raise ConfigError("a score is not finite")
        return scorer.values(batch)

    batches = Batches(score)
    asked = (batches.values(each) for each in (first, others[0], culprit, others[1]))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(found.pop(2), ConfigError)
    wanted = [each.tolist() for each in scorer.values([first, *others])]
    assert np.allclose(found, wanted, rtol=1e-5)  # type: ignore[arg-type]
    assert sizes == [4, 2, 2, 1, 1]


async def test_a_server_of_another_model_is_refused(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    (episode,) = await played(config, tmp_path, 1)
    async with listening(scorer) as url:
        client = RewardClient(url=url, reads=reads(scorer))
        await client.values(episode)
    async with listening(scorer, model="b") as url:
        client.url = url
        with pytest.raises(EnvError, match="serves another reward model than before"):
            await client.values(episode)


async def test_a_part_asks_a_server_which_away_is_no_zero(config: Config, scorer: RewardScorer, tmp_path: Path) -> None:
    stage = stage_on(config, tmp_path)

    async def reward(url: str, root: str, **changes: float) -> Trajectory:
        part = {"part": "reward_model", "url": url, "weight": 2.0, "deadline_s": 60.0, **changes}
        parts = {config.env.name: parts_of("env.rewards", {"steps": part})}
        read_as(root, parts)
        record = EpisodeRecord(attempt=attempt(config, 0))
        beside: Any = {"tokenizer": stage.tokenizer, "allowance": stage.allowance}
        trajectory = await rollout_of(GuessEnv(), stage.engine, record=record, **beside)
        return await rewarded(trajectory, record, scoring=Scoring(parts=parts, **beside))

    async with listening(scorer) as own_url:
        found = await reward(own_url, text_root(stage.tokenizer))
        with pytest.raises(EpisodeFailed, match=r"`env.rewards.steps`: .* status 409: .*tokenizer") as failed:
            await reward(own_url, "another")
        assert failed.value.outcome is Outcome.ENV_FAILURE
    with pytest.raises(EpisodeFailed, match=r"`env.rewards.steps`: .*: Client.* would be too late") as failed:
        await reward(own_url, text_root(stage.tokenizer), deadline_s=2.0)
    assert failed.value.outcome is Outcome.ENV_FAILURE
    (values,) = scorer.values([ScoredEpisode.of(found)])
    assert [turn.rewards["steps"] for turn in found.turns] == pytest.approx(2 * progress(values), rel=1e-5)
    assert found.part_values["steps"] == pytest.approx(values[-1], rel=1e-5)


def test_an_episode_without_values_is_left_out(
    config: Config, scorer: RewardScorer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, first = scored_here(scorer), iter(range(8))

    async def values(episode: ScoredEpisode) -> Numbers:
        if next(first, None) is not None:
            raise EpisodeFailed(StopReason.INFRA_ERROR, "no answer")
        return await here.of_episode(episode)

    lossy = replace(here, of_episode=values)
    rows = collected(stage_on(config, tmp_path), config, tmp_path / "rows.jsonl", lossy, **SEARCH)
    assert rows and "8 episodes are left out" in capsys.readouterr().err
    asked = replace(config, eval=replace(config.eval, num_tasks=20))
    first = iter(range(8))
    assert evaluate_on(stage_on(config, tmp_path), asked, EvalOptions(attempts=2), values=lossy) == 0
    sampled, greedy = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert (sampled["num_episodes"], greedy["num_episodes"]) == (32, 20)


def test_what_cannot_be_asked_is_refused_by_name() -> None:
    for settings, complaint in (
        ({"part": "reward_model"}, "missing a required argument: 'url'"),
        ({"part": "reward_model", "url": "runs/x"}, "`env.rewards.x`: the address must be like http://HOST:PORT"),
        ({"part": "reward_model", "url": "http://me:word@h:1/"}, "the address must be like http://HOST:PORT"),
        ({"part": "reward_model", "url": "http://h:1/a@b", "deadline_s": 0}, "deadline_s must be above 0, got 0"),
        ({"part": "reward_model", "url": "http://h:1", "deadline_s": 0}, "deadline_s must be above 0, got 0"),
    ):
        with pytest.raises(ConfigError, match=re.escape(complaint)):
            parts_of("env.rewards", {"x": settings})
    with pytest.raises(ConfigError, match=r"`objective\.reward_model` must be a folder"):
        load_config(None, ["objective.reward_model=http://h:1"])
    with pytest.raises(ConfigError, match="must be empty with a part `reward_model`"):
        load_config(None, ["objective.reward_model=x", "env.rewards.reward_model={url: 'http://h:1'}"])
