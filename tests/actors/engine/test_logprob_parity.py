"""What the actors record and what the learner computes with the same weights is the same number, to 1e-3 nats.

Real episodes of `shop`, played by vLLM while the learner's publisher offers new weights again and again.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.host.pin import Pin
from slipstream.actors.host.poll_interval import PollInterval
from slipstream.actors.host.refresh import RefreshCounts, keep_fresh
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.records.trajectory import LogprobArray, MaskArray, Outcome, Sampling, Trajectory, check
from slipstream.envhub.catalogue import make_env
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_layout, full_tensors
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.bench.weights_stage import publish_whole
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, policy_versions, rollout_of
from tests.actors.forward_pass import TOLERANCE
from tests.actors.vllm_engines import MAX_TOKENS, RECEIVER, started
from tests.learner.publisher.offers import publisher_settings
from tests.learner.publisher.test_weights import Plane
from tests.tools.run.tiny_model import FLOAT32

NUM_PLAYERS = 6
NUM_VERSIONS = 4
OPTIONS = {"profile": "small"}
LIMITS = dataclasses.replace(ALLOWANCE, max_tokens=MAX_TOKENS, step_timeout_s=60.0)
SAMPLING = Sampling(temperature=0.9, top_p=1.0, top_k=0, max_turn_tokens=32)
CUT_SAMPLING = Sampling(temperature=0.9, top_p=0.9, top_k=5, max_turn_tokens=32)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """One model with several sets of weights, as the learner holds it; version 0 is the folder's."""

    folder: Path
    models: list[PackedModel]


@pytest.fixture(scope="module")
def policies(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    root = tmp_path_factory.mktemp("policies")
    folder = root / "version_0"
    texts = vocabulary_texts(EnvConfig(name="shop", options=OPTIONS), 60)
    make_tiny_model(folder, texts=texts, shape=TinyShape(), max_tokens=MAX_TOKENS, seed=3)
    for version in range(1, NUM_VERSIONS):
        save_changed(folder, root / f"version_{version}", seed=version)
    settings = dataclasses.replace(FLOAT32, temperature=SAMPLING.temperature)
    folders = [root / f"version_{version}" for version in range(NUM_VERSIONS)]
    return Policies(folder=folder, models=[load_model(each, ranks=ranks, settings=settings) for each in folders])


def save_changed(folder: Path, changed: Path, *, seed: int) -> None:
    """The model of `folder` with other weights, far enough away that no log-probability passes for the first's."""
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(changed)


@pytest.mark.parametrize(
    ("kv_policy", "sampling"),
    [
        pytest.param("recompute", SAMPLING, marks=pytest.mark.long),
        pytest.param("keep", SAMPLING, marks=pytest.mark.long),
        ("recompute", CUT_SAMPLING),
    ],
)
def test_recorded_logprobs_are_the_learners_own_across_weight_changes_in_mid_generation(
    kv_policy: str, sampling: Sampling, policies: Policies, plane: Plane
) -> None:
    entries, place = full_layout(policies.models[0]), {"redis_url": plane.redis_url, "run_id": plane.run_id}
    settings = publisher_settings(**place, entries=entries, learner_epoch=1)
    receiver = dataclasses.replace(RECEIVER, **place, chunk_bytes=1 << 20)
    with closing(Publisher(settings, log_path=plane.folder / "publisher.log")) as publisher:
        engine = started(policies.folder, kv_policy=kv_policy, receiver=receiver)
        try:
            trajectories, counts = asyncio.run(episodes_under_refreshes(engine, publisher, policies, plane, sampling))
        finally:
            asyncio.run(engine.close())
    assert counts.num_committed == NUM_VERSIONS - 1 and counts.refusal is None
    assert 0 < counts.last_pause_s < 10
    assert all(trajectory.outcome is Outcome.POLICY for trajectory in trajectories)

    crossing = [count for trajectory in trajectories for count in versions_of_turns(trajectory) if count > 1]
    assert crossing, "no weight change fell inside a generation"
    assert any(trajectory.newest_policy_version > trajectory.oldest_policy_version for trajectory in trajectories)
    worst, num_checked, num_mixed = 0.0, 0, 0
    for trajectory in trajectories:
        differences = np.abs(recomputed(policies.models, trajectory) - trajectory.behaviour_logprob_array())
        checked = trajectory.loss_mask_array()
        if kv_policy == "keep":
            mixed = on_older_kv(trajectory)
            num_mixed += int(mixed.sum())
            checked &= ~mixed
        worst = max(worst, float(differences[checked].max()))
        num_checked += int(checked.sum())
    print(
        f"{kv_policy}: {num_checked} tokens agree to {worst:.1e} nats; {len(crossing)} generations crossed a change, "
        f"{num_mixed} tokens on older KV, pause {1e3 * counts.last_pause_s:.1f} ms"
    )
    assert worst < TOLERANCE
    for trajectory in trajectories:
        check(trajectory, vocab_size=policies.models[0].vocab_size)
    if sampling.is_cut:
        check_kept_sets(trajectories, policies.models)
    another = [*policies.models[1:], policies.models[0]]
    assert np.abs(recomputed(another, trajectories[0]) - recomputed(policies.models, trajectories[0])).max() > 0.1


def check_kept_sets(trajectories: list[Trajectory], models: list[PackedModel]) -> None:
    """They cut something off, no more than the sampling says, and without them the learner would be far off."""
    counts = np.concatenate([trajectory.kept.count_array() for trajectory in trajectories if trajectory.kept])
    assert len(counts) == sum(int(trajectory.loss_mask_array().sum()) for trajectory in trajectories)
    assert set(counts.tolist()) <= set(range(1, CUT_SAMPLING.top_k + 1))
    whole = [msgspec.structs.replace(trajectory, kept=None) for trajectory in trajectories]
    worst = max(float(np.abs(recomputed(models, each) - each.behaviour_logprob_array()).max()) for each in whole)
    print(f"kept sets of {counts.mean():.2f} tokens; without them the learner is off by {worst:.2f} nats")
    assert counts.mean() > 1.5
    assert worst > 0.1


async def episodes_under_refreshes(
    engine: VllmEngine, publisher: Publisher, policies: Policies, plane: Plane, sampling: Sampling
) -> tuple[list[Trajectory], RefreshCounts]:
    """Every episode of NUM_PLAYERS players who continue until the last version is served."""
    # Served already; but its process is up then.
    publish_whole(publisher, full_tensors(policies.models[0]), policy_version=0)
    await asyncio.to_thread(plane.wait_for, 0)
    counts, indices = RefreshCounts(), itertools.count()
    refreshing = asyncio.create_task(keep_fresh(engine, plane.bulletin.later, counts, Pin(), PollInterval()))
    playing = [play(engine, policies.folder, indices, plane.run_id, sampling) for _ in range(NUM_PLAYERS)]
    players = [asyncio.create_task(each) for each in playing]
    try:
        async with asyncio.timeout(240):
            for version in range(1, NUM_VERSIONS):
                generated = engine.load().generated_tokens
                while engine.load().generated_tokens < generated + 100:  # noqa: ASYNC110 - the engine's thread counts
                    await asyncio.sleep(0.005)
                publish_whole(publisher, full_tensors(policies.models[version]), policy_version=version)
                await engine.serving(version)
            return [trajectory for played in await asyncio.gather(*players) for trajectory in played], counts
    finally:
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)


async def play(
    engine: VllmEngine, folder: Path, task_indices: Iterator[int], run_id: str, sampling: Sampling
) -> list[Trajectory]:
    """One episode after another, until one began under the last version."""
    tokenizer, trajectories, is_last = AutoTokenizer.from_pretrained(folder), [], False
    while not is_last:
        is_last = engine.policy_version == NUM_VERSIONS - 1
        index = next(task_indices)
        attempt = dataclasses.replace(attempt_on(index), run_id=run_id, group_id=index, member=0, sampling=sampling)
        env, record = make_env("shop", OPTIONS), EpisodeRecord(attempt=attempt)
        trajectories.append(await rollout_of(env, engine, record=record, tokenizer=tokenizer, allowance=LIMITS))
    return trajectories


def recomputed(models: list[PackedModel], trajectory: Trajectory) -> LogprobArray:
    """The log-probability of each sampled token by the learner's model of its own version, and 0 elsewhere."""
    versions, mask = policy_versions(trajectory), trajectory.loss_mask_array()
    logprobs = np.zeros(trajectory.num_tokens, dtype=np.float32)
    packs = [pack([sequence]) for sequence in sequences_of(trajectory, advantage=0.0)]  # one would sort the branches
    for version in sorted(set(versions[mask].tolist())):
        by_version = np.zeros_like(logprobs)
        with torch.no_grad():
            by_version[mask] = torch.cat([models[version](packed).logprobs for packed in packs]).numpy()
        logprobs[versions == version] = by_version[versions == version]
    return logprobs


def versions_of_turns(trajectory: Trajectory) -> list[int]:
    """How many versions each generation holds."""
    versions = policy_versions(trajectory)
    return [len(set(versions[turn.start : turn.stop].tolist())) for turn in trajectory.turns]


def on_older_kv(trajectory: Trajectory) -> MaskArray:
    """The tokens of a version that came while their generation ran: what stood before them keeps the older KV."""
    versions = policy_versions(trajectory)
    mixed = np.zeros(trajectory.num_tokens, dtype=np.bool_)
    for turn in trajectory.turns:
        mixed[turn.start : turn.stop] = versions[turn.start : turn.stop] != versions[turn.start]
    return mixed
