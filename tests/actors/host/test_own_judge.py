"""A judge that is the run's own policy: what the engine is asked, what is recorded, and what each failure becomes."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from slipstream.actors.engine.engine import Completion, EngineDied, EngineError
from slipstream.actors.host.own_judge import OwnJudge
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Sampling, VersionSpan
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.part import Part, group_parts, judge_by, parts_of
from slipstream.envhub.rewards.sibling_judge import sibling_marks
from tests.actors.episode.episodes import engine_of
from tests.actors.group.test_group import TOKENIZER, TURNS, buffer, trained
from tests.actors.group.test_reward_stage import scorer
from tests.actors.scripted_judge import impatient
from tests.envhub.rewards.test_group_judge import shown
from tests.envhub.rewards.test_judge import judge_at
from tests.envhub.rewards.test_rewards import episode_of, turn_of
from tests.replay.records.attempts import Views

__all__ = ["buffer", "impatient"]  # fixtures

RUBRIC = {"text": "You mark answers.", "scale": [0, 10], "criteria": {"clear": "It is clear."}}
OWN = {"part": "judge", "url": "actors", "rubric": RUBRIC, "weight": 0.5}


class Marker:
    """A policy of version 4 that answers every prompt with `answer`, or raises it."""

    def __init__(self, *answers: str | Exception, num_before_commit: int = 1 << 30) -> None:
        """After `num_before_commit` answers, version 5 overtakes each in its middle."""
        self.answers = list(answers)
        self.num_before_commit = num_before_commit
        self.prompts: list[str] = []
        self.samplings: list[Sampling] = []

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        self.prompts.append(str(TOKENIZER.decode(tokens)))
        self.samplings.append(sampling)
        number = len(self.prompts)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        engine = engine_of(lambda *_: list(TOKENIZER.encode(answer + TOKENIZER.eos_token)), max_tokens=8192)
        completion = await engine.generate(tokens, sampling)
        if number <= self.num_before_commit:
            return completion
        spans = [VersionSpan(start=0, stop=2, policy_version=4)]
        spans.append(VersionSpan(start=2, stop=len(completion.tokens), policy_version=5))
        return dataclasses.replace(completion, version_spans=spans)


def own_judge(policy: Marker) -> OwnJudge:
    return OwnJudge(sampler=policy, tokenizer=TOKENIZER, model=ModelConfig(max_tokens=8192))


def parts_by(policy: Marker, rewards: dict[str, Any]) -> list[Part]:
    parts = parts_of("env.rewards", rewards)
    judge_by(own_judge(policy), {"shop": parts})
    return parts


def marked(policy: Marker, rewards: dict[str, Any] | None = None) -> Any:
    (part,) = parts_by(policy, rewards or {"clear": OWN})
    return asyncio.run(part.values(episode_of(turn_of("hello")), timeout_s=30.0))


def test_the_policy_marks_an_episode_and_its_version_is_recorded() -> None:
    policy = Marker('{"clear": 8}')
    found = marked(policy)
    assert (found.value, found.policy_version) == (0.8, 4)
    assert policy.samplings == [Sampling(temperature=0, top_p=1, top_k=0, max_turn_tokens=512)]
    (prompt,) = policy.prompts
    assert "You mark answers." in prompt and "hello" in prompt
    assert prompt.rstrip().endswith("assistant"), "the policy's own chat template, up to its reply"


def test_malformed_marks_and_failures_of_one_request_are_tried_again() -> None:
    policy = Marker("good!", EngineError("out of blocks"), '{"clear": 5}')
    assert marked(policy).value == 0.5
    assert len(policy.prompts) == 3


def compared(policy: Marker, *replies: str) -> list[tuple[float, int | None]]:
    ((_, judge),) = group_parts(parts_by(policy, {"clear": OWN | {"compare": "listwise"}}))
    return [(mark.value, mark.policy_version) for mark in asyncio.run(sibling_marks(judge, shown(*replies)))]


def test_the_policy_marks_a_group_and_the_version_that_ended_the_verdict_is_recorded() -> None:
    policy = Marker('{"1": 2, "2": 2}', num_before_commit=0)
    assert compared(policy, "hello", "bye", "bye") == [(0.2, 5)] * 3
    (prompt,) = policy.prompts
    assert "has 2 attempts at the same task" in prompt and "hello" in prompt and prompt.count("bye") == 1


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        ({"model": "m"}, {}, "model.*leave it out"),
        ({"key_env": "KEY"}, {}, "key_env"),
        ({"request": {"temperature": 0}}, {}, "request.*temperature and max_tokens alone"),
        ({"request": {"temperature": 0, "max_tokens": 0}}, {}, "request.max_tokens.*>= 1"),
        ({"request": {"temperature": -1, "max_tokens": 9}}, {}, "request.temperature"),
        ({}, {"clear_policy_version": {"part": "format"}}, "choose another name"),
    ],
)
def test_what_the_policy_would_not_read_is_refused(settings: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parts_of("env.rewards", {"clear": {**OWN, **settings}} | more)


def test_a_process_without_an_engine_says_so() -> None:
    judge = judge_at("actors", model="")
    with pytest.raises(EnvError, match="this process has none"):
        asyncio.run(judge(episode_of(turn_of("hello"))))


def test_an_actor_judges_its_own_episodes_with_its_only_place_taken(buffer: Views, run_id: str) -> None:
    """The judge's requests are no episodes: they are not stored, and need no place."""
    actor, policy = scorer("actor", run_id, {"clear": OWN}), Marker('{"clear": 10}')
    judge_by(own_judge(policy), actor.setup.scoring.parts)
    actor.plays(buffer)
    assert actor.setup.episodes.num_running == 0
    for member in trained(buffer):
        assert member.turns[-1].rewards["clear"] == 0.5
        assert member.part_values == {"clear": 1.0, "clear_policy_version": 4.0}
        assert len(member.turns) == TURNS, "the judge's tokens are not among the trained ones"
    assert "You mark answers." in json.dumps(policy.prompts)


def test_an_engine_that_dies_under_a_judge_fails_no_attempt(buffer: Views, run_id: str) -> None:
    actor = scorer("actor", run_id, {"clear": OWN})
    judge_by(own_judge(Marker(EngineDied("gone"))), actor.setup.scoring.parts)
    with pytest.raises((EngineDied, ExceptionGroup)):
        actor.plays(buffer)
    assert buffer.ledger.failed == {}


def test_a_column_that_is_no_text_fails_the_attempt_and_not_the_actor() -> None:
    (part,) = parts_by(Marker("7"), {"good": OWN | {"columns": ["answer"]}})
    asyncio.run(part.values(episode_of(turn_of("4"), columns={"answer": "fine"}), timeout_s=60.0))
    with pytest.raises(EnvError, match="what the judge is shown cannot be sent"):
        asyncio.run(part.values(episode_of(turn_of("4"), columns={"answer": "\ud800"}), timeout_s=60.0))
