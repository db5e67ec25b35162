"""Episodes that verifiers plays: our driver in a process of its own, our endpoint, and the actor's own rollout.

What stands for the package (tests/verifiers_stub) asks as 0.4.0 does, and refuses what it refuses; with the package
itself, tests/adapters/verifiers plays.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import load_config
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Outcome, StopReason, Trajectory, check
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.adapters.verifiers_env import VerifiersEnv
from slipstream.envhub.catalogue import make_any_env, make_env
from slipstream.envhub.driving import Reply, Request, Terms
from slipstream.envhub.env import EnvError
from slipstream.tools.lab.soak.scripted_engine import ScriptedEngine
from slipstream.tools.run.check_input import check_input
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, rollout_of
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.envhub.env_cases import task_of
from tests.waiting import until

STUB = Path(__file__).parent / "verifiers_stub"
TOKENIZER = merging_tokenizer(CHATML)
END = 99
DEADLINE_S = 60.0


def answered(tokens: list[int], seed: int | None = None) -> list[int]:
    if max(tokens) > END:
        raise ValueError(f"token ids up to {max(tokens)}, the model has [0, 100)")
    return [50 + sum(tokens) % 40, END]


@pytest.fixture(autouse=True)
def where_verifiers_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(STUB))


def part(**taskset: Any) -> MixtureEntry:
    config = {"taskset": {"id": "numbers", **taskset}}
    return MixtureEntry(name="verifiers", options={"python": sys.executable, "config": config})


def engine(token_time_s: float = 0.0) -> ScriptedEngine:
    return engine_of(answered, token_time_s=token_time_s)


async def played(options: MixtureEntry, *, sampler: ScriptedEngine | None = None, **settings: Any) -> Trajectory:
    """One episode by the actor's own code, on a fresh environment."""
    record = settings.setdefault("record", EpisodeRecord(attempt=attempt_on()))
    settings.setdefault("allowance", replace(ALLOWANCE, step_timeout_s=DEADLINE_S))
    async with fresh_env({record.attempt.task.env: options}, record.attempt.task, timeout_s=DEADLINE_S) as env:
        return await rollout_of(env, sampler or engine(), tokenizer=TOKENIZER, **settings)


def play(options: MixtureEntry, **settings: Any) -> Trajectory:
    return asyncio.run(played(options, **settings))


def is_running(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_an_episode_is_recorded_as_it_was_asked_and_answered() -> None:
    trajectory = play(part())
    check(trajectory, vocab_size=100)
    tokens = trajectory.token_array().tolist()
    (start, *_), expected = tokens, []
    for _ in range(3):
        expected += [start, 1] if not expected else [2]
        expected += answered(expected)
    assert tokens == expected
    assert trajectory.loss_mask_array().tolist() == [token >= 50 for token in expected]
    assert [turn.rewards for turn in trajectory.turns] == [{"right": 0.0}] * 2 + [{"right": 0.5, "short": 0.25}]
    assert (trajectory.score, trajectory.success, trajectory.branch_starts) == (0.75, False, [0])
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.DONE, Outcome.POLICY)
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop"] * 3


def test_a_prompt_that_does_not_continue_the_last_answer_begins_a_branch() -> None:
    trajectory = play(part(does="branch"))
    check(trajectory, vocab_size=100)
    tokens = trajectory.token_array().tolist()
    first = trajectory.turns[0].stop
    assert trajectory.branch_starts == [0, first]
    # What was sampled in the first branch is read in the second one, and trained in the first alone.
    assert tokens[first : trajectory.turns[1].start] == [tokens[0], *tokens[2:first], 3]
    assert not trajectory.loss_mask_array()[first : trajectory.turns[1].start].any()


@pytest.mark.parametrize(
    ("taskset", "limits", "ending"),
    [
        ({"turns": 9}, {"max_turns": 2}, StopReason.MAX_TURNS),
        ({"turns": 9, "does": "context"}, {"max_tokens": 40}, StopReason.MAX_TOKENS),
    ],
)
def test_the_policys_own_limits_end_an_episode_that_is_scored(taskset: Any, limits: Any, ending: StopReason) -> None:
    allowance = replace(ALLOWANCE, step_timeout_s=DEADLINE_S, **limits)
    trajectory = play(part(**taskset), allowance=allowance)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (ending, 2)
    assert trajectory.outcome is Outcome.POLICY
    assert trajectory.turns[-1].rewards == {"right": 0.5, "short": 0.25}


def test_a_harness_that_fails_over_a_full_context_ends_the_episode_without_reward() -> None:
    allowance = replace(ALLOWANCE, max_tokens=8, step_timeout_s=DEADLINE_S)
    trajectory = play(part(turns=9), allowance=allowance)
    assert (trajectory.stop_reason, trajectory.total_reward, trajectory.score) == (StopReason.MAX_TOKENS, 0.0, 0.0)
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize(
    ("does", "complaint"),
    [
        ("hot", r"temperature is 1\.0 in this run, and 0\.3 was requested"),
        ("strange_token", "requested a generation from an invalid prompt"),
        ("second_agent", "the policy plays one agent"),
        ("forget", "its trace has 2 turns, which differ from the 3 sampled ones"),
        ("unscored", "its rewards are {'right': None, 'short': None}"),
        ("nan", "returned reward 'right' = nan"),
        ("timeout", "a timeout of verifiers ended the episode: agent_timeout"),
        ("die", "its process ended"),
        ("hang", r"neither requested a generation nor ended within 2\.0 s"),
    ],
)
def test_a_failure_of_others_is_an_env_failure_and_never_a_reward_of_0(does: str, complaint: str) -> None:
    step_timeout_s = 2.0 if does == "hang" else DEADLINE_S
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        play(part(does=does), allowance=replace(ALLOWANCE, step_timeout_s=step_timeout_s))
    assert failed.value.outcome is Outcome.ENV_FAILURE


def test_an_answer_to_a_request_that_has_ended_is_an_env_failure() -> None:
    with pytest.raises(EpisodeFailed, match=r"did not wait for 1 answers|ended before any generation was complete"):
        play(part(does="impatient"), sampler=engine(token_time_s=5.0))


def configured(**config: Any) -> MixtureEntry:
    return MixtureEntry(name="verifiers", options=part().options | {"config": {"taskset": {"id": "numbers"}, **config}})


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"a": {}, "b": {}}, r"the policy would play 2 of the agents \['a', 'b'\]; give all but one a client"),
        ({"agent": {"client": "elsewhere"}}, "the policy would play 0 of the agents"),
        ({"agent": {"harness": "bash"}}, "the harness bash of agent runs the policy's code; set a runtime"),
    ],
)
def test_a_configuration_that_one_policy_cannot_play_is_an_env_failure(config: Any, complaint: str) -> None:
    with pytest.raises(EpisodeFailed, match=complaint):
        play(configured(**config))


def test_a_harness_that_runs_the_policys_code_uses_the_configured_runtime() -> None:
    assert len(play(configured(agent={"harness": "bash", "runtime": {"type": "subprocess"}})).turns) == 3


def test_nothing_is_played_without_uv_which_would_be_installed_otherwise(tmp_path: Path) -> None:
    (tmp_path / "uv").unlink()
    os.environ["PATH"] = str(tmp_path)
    with pytest.raises(EpisodeFailed, match="`uv` is missing"):
        play(part())


async def test_episodes_share_a_process_and_keep_apart_and_it_ends_with_the_last(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    records = [EpisodeRecord(attempt=replace(attempt_on(index), member=index)) for index in range(8)]
    trajectories = await asyncio.gather(
        *(played(part(pids=str(pids)), record=record, sampler=engine(token_time_s=0.01)) for record in records)
    )
    alone = [await played(part(), record=EpisodeRecord(attempt=attempt_on(index))) for index in (0, 5)]
    assert [trajectories[0].tokens, trajectories[5].tokens] == [trajectory.tokens for trajectory in alone]
    assert len({trajectory.tokens for trajectory in trajectories}) == 8
    (pid,) = pids.read_text().split()
    assert not is_running(pid)


async def test_a_process_that_dies_takes_its_episodes_along_and_the_next_has_a_new_one(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    options = part(does="hang", pids=str(pids))
    playing = [asyncio.create_task(played(options)) for _ in range(2)]
    await until(lambda: pids.exists() and pids.read_text().endswith("\n"), "the process is up")
    os.kill(int(pids.read_text()), 9)
    for task in playing:
        with pytest.raises(EpisodeFailed, match="its process ended"):
            await task
    again = asyncio.create_task(played(options))
    await until(lambda: len(pids.read_text().split()) == 2, "a new process is up")
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    assert not any(is_running(pid) for pid in pids.read_text().split())


async def test_a_lost_episode_that_is_not_yet_closed_does_not_keep_a_dead_process_in_use(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    lost, next_one = (make_any_env("verifiers", part(pids=str(pids)).options) for _ in range(2))
    limits: dict[str, Any] = {"max_tokens": 256, "max_turns": 8, "sampling": attempt_on().sampling}
    terms = Terms(tokenizer=TOKENIZER, end_tokens=end_tokens(TOKENIZER), started_at_s=0.0, **limits)
    assert isinstance(lost, VerifiersEnv) and isinstance(next_one, VerifiersEnv)
    asked: list[list[int]] = []

    async def killed(request: Request) -> Reply:
        asked.append(request.prompt)
        os.kill(int(pids.read_text()), 9)
        await asyncio.sleep(3600)
        raise AssertionError

    async def sampled(request: Request) -> Reply:
        asked.append(request.prompt)
        return Reply(tokens=answered(request.prompt), logprobs=[0.0, 0.0], finish_reason="stop")

    with pytest.raises(EnvError, match="its process ended"):
        await lost.play_episode(task_of("verifiers"), terms, killed)
    await next_one.play_episode(task_of("verifiers"), terms, sampled)
    assert asked[1] == asked[0]
    await next_one.close()
    await lost.close()
    assert len(pids.read_text().split()) == 2
    assert not any(is_running(pid) for pid in pids.read_text().split())


async def cut_in_turn(turn: int, options: MixtureEntry) -> Trajectory:
    record, sampler = EpisodeRecord(attempt=attempt_on()), engine(token_time_s=0.05)
    playing = asyncio.create_task(played(options, record=record, sampler=sampler))
    await until(lambda: len(record.turns) == turn and sampler.load().num_running == 1, "the turn is being written")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    return record.partial()


async def test_a_preempted_episode_continues_elsewhere_with_the_sampled_tokens() -> None:
    partial = await cut_in_turn(2, part(does="branch"))
    check(partial, vocab_size=100)
    resumed = await played(part(does="branch"), record=resumed_record(attempt_on(), partial))
    whole = await played(part(does="branch"))
    for name in ("tokens", "loss_mask", "branch_starts"):
        assert getattr(resumed, name) == getattr(whole, name)
    assert [turn.rewards for turn in resumed.turns] == [turn.rewards for turn in whole.turns]


async def test_a_preempted_episode_does_not_continue_in_another_environment() -> None:
    partial = await cut_in_turn(2, part(does="random"))
    first = bytes([partial.tokens[0] ^ 1])  # another token than it is, whichever that is
    other = resumed_record(attempt_on(), msgspec.structs.replace(partial, tokens=first + partial.tokens[1:]))
    brief = replace(ALLOWANCE, step_timeout_s=5.0)
    with pytest.raises(EpisodeFailed, match="2 of its 2 recorded prompts were not sent again") as failed:
        await played(part(does="random"), record=other, allowance=brief)
    assert failed.value.outcome is Outcome.REPLAY_MISMATCH
    record = resumed_record(attempt_on(), await cut_in_turn(1, part()))
    with pytest.raises(EpisodeFailed, match="1 of its 1 recorded prompts were not sent again"):
        await played(part(first=20), record=record, allowance=brief)


async def prompts(split: str, options: MixtureEntry) -> set[int]:
    attempts = [replace(attempt_on(), task=task_of("shop", index, split)) for index in range(50)]
    records = [EpisodeRecord(attempt=attempt) for attempt in attempts]
    trajectories = await asyncio.gather(*(played(options, record=record) for record in records))
    return {int(trajectory.token_array()[0]) for trajectory in trajectories}


async def test_an_eighth_of_the_tasks_is_held_out_by_what_they_say_or_another_taskset_is() -> None:
    train, held_out = await prompts("train", part(turns=1)), await prompts("held_out", part(turns=1))
    assert train | held_out == set(range(20)) and not train & held_out and train and held_out
    of_two = part(turns=1, num_tasks=10)
    of_two.options["held_out"] = {"first": 30}
    assert await prompts("train", of_two) == set(range(10))
    assert await prompts("held_out", of_two) == set(range(30, 40))


def test_the_process_sees_no_secret_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_FROM_EPISODES", "a secret")
    monkeypatch.setenv("MY_JUDGE_KEY", "another")
    options = part(does="secrets")
    options.options["secrets"] = {"JUDGE_KEY": "MY_JUDGE_KEY"}
    assert play(options).turns[-1].rewards == {"HIDDEN_FROM_EPISODES": 0.0, "JUDGE_KEY": 1.0}


def test_options_that_do_not_fit_are_refused_when_it_is_made() -> None:
    for changes, complaint in (
        ({"python": "/no/such/python"}, "must be a Python interpreter, got '/no/such/python'"),
        ({"config": {"agent": {}}}, "must have a taskset"),
        ({"secrets": {"KEY": "NOT_SET_HERE"}}, "NOT_SET_HERE is not set"),
        ({"game": "chess"}, "its options are: python, config"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make_any_env("verifiers", part().options | changes)
    with pytest.raises(ValueError, match="runs whole episodes itself"):
        make_env("verifiers", part().options)  # to play it action by action


@pytest.mark.parametrize("settings", [[], ["model.path=/m", "warm_start.episodes=3"]])
def test_a_run_that_needs_an_expert_is_refused(settings: list[str]) -> None:
    options = [f"env.options.python={sys.executable}", "env.options.config.taskset.id=numbers"]
    with pytest.raises(ConfigError, match="verifiers has no expert"):
        check_input(load_config(None, ["env.name=verifiers", *options, *settings]))
