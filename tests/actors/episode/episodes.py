"""Episodes without a model: a scripted policy, an environment, and the actors' own rollout."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, Sampler
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed, rollout
from slipstream.common.records.kept_sets import KeptSets
from slipstream.common.records.trajectory import (
    Outcome,
    Provenance,
    Sampling,
    StopReason,
    Task,
    TokenArray,
    Trajectory,
    VersionSpan,
    check,
)
from slipstream.common.text.action_format import FORMATS, ActionFormat
from slipstream.envhub.env import Env, Observation
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.learner.skipping_loop import run_skipping

Script = Callable[[list[int], int | None], list[int]]

ALLOWANCE = Allowance(max_turns=8, max_tokens=256, step_timeout_s=30.0, episode_timeout_s=600.0)


def attempt_on(index: int = 0, *, max_turn_tokens: int = 64, seed: int = 7) -> Attempt:
    return Attempt(
        run_id="run",
        task=Task(env="shop", split="train", index=index),
        group_id=3,
        member=1,
        actor="actor-0",
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=max_turn_tokens),
        seed=seed,
        provenance=Provenance(host="host", instance_kind="reserved", price_per_hour=0.0),
    )


def policy_versions(trajectory: Trajectory) -> TokenArray:
    """The version of each token, -1 where it was not sampled."""
    versions = np.full(trajectory.num_tokens, -1, dtype=np.int32)
    for span in trajectory.version_spans:
        versions[span.start : span.stop] = span.policy_version
    return versions


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    tokens = trajectory.token_array().tolist()
    starts = [max(start for start in trajectory.branch_starts if start < turn.start) for turn in trajectory.turns]
    turns = zip(starts, trajectory.turns, strict=True)
    return [(tokens[start : turn.start], tokens[turn.start : turn.stop]) for start, turn in turns]


def completion_of(
    tokens: list[int], logprobs: list[float], *, kept: KeptSets | None = None, finish_reason: str = "stop"
) -> Completion:
    """What an engine answers, all of it by version 0."""
    spans = [VersionSpan(start=0, stop=len(tokens), policy_version=0)]
    return Completion(tokens=tokens, logprobs=logprobs, kept=kept, version_spans=spans, finish_reason=finish_reason)


def timeless(trajectory: Trajectory) -> Trajectory:
    turns = [msgspec.structs.replace(turn, generate_s=0.0, env_s=0.0) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=turns, started_at_s=0.0, duration_s=0.0)


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def apart(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text as a policy may sample it: every character by itself, where the tokenizer would merge some."""
    special = "|".join(map(re.escape, tokenizer.get_added_vocab()))
    return [token for part in re.findall(f"{special}|.", text, re.DOTALL) for token in ids(tokenizer, part)]


def expert(env: Env, tokenizer: PreTrainedTokenizerBase, action_format: ActionFormat = FORMATS["plain"]) -> Script:
    """Writes what the environment's own expert would do."""
    return lambda tokens, seed: ids(tokenizer, action_format.write(env.expert()) + tokenizer.eos_token)


def saying(tokenizer: PreTrainedTokenizerBase, *turns: str) -> Script:
    left = iter(turns)
    return lambda tokens, seed: ids(tokenizer, next(left))


def engine_of(script: Script, *, max_tokens: int = 256, token_time_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(script, policy_version=4, schedule=Schedule(token_time_s=token_time_s), max_tokens=max_tokens)


async def rollout_of(env: Env, sampler: Sampler, *, record: EpisodeRecord | None = None, **settings: Any) -> Trajectory:
    """Roll out one episode; without other `settings`, in the words of the shop and with plain actions."""
    record = record or EpisodeRecord(attempt=attempt_on())
    tokenizer = settings.pop("tokenizer", None) or shop_tokenizer()
    settings = {"action_format": FORMATS["plain"], "allowance": ALLOWANCE, **settings}
    return await rollout(record, env=env, sampler=sampler, tokenizer=tokenizer, **settings)


def play(env: Env, sampler: Sampler, *, attempt: Attempt | None = None, **settings: Any) -> Trajectory:
    """Roll out one episode, by a clock that skips every wait, and check its record."""
    record = EpisodeRecord(attempt=attempt or attempt_on())
    trajectory = run_skipping(rollout_of(env, sampler, record=record, **settings))
    check(trajectory, vocab_size=len(settings.get("tokenizer") or shop_tokenizer()))
    return trajectory


def failure_of(env: Env, sampler: Sampler, *, complaint: str | None, **settings: Any) -> tuple[StopReason, Outcome]:
    """Roll out one episode that fails."""
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        play(env, sampler, **settings)
    return failed.value.stop_reason, failed.value.outcome


class Broken(ShopEnv):
    """A shop that answers its second action, or its reset, with whatever it is given, or raises it."""

    def __init__(self, answer: object, *, at: str = "step") -> None:
        super().__init__()
        self.answer, self.at = answer, at
        self.num_steps = 0

    async def reset(self, task: Task) -> Observation:
        return await self._broken() if self.at == "reset" else await super().reset(task)

    async def step(self, action: str) -> Observation:
        self.num_steps += 1
        return await super().step(action) if self.num_steps == 1 else await self._broken()

    async def _broken(self) -> Observation:
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer == "hang":
            await asyncio.sleep(3600)
        return self.answer  # type: ignore[return-value]
