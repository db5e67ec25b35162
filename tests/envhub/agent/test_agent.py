"""The `agent` environment: agents of a user's, unchanged, play through an OpenAI-compatible endpoint of the episode."""

import asyncio
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import load_config
from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Outcome, StopReason, Task, Trajectory, check
from slipstream.envhub.agent.agent import AgentEnv
from slipstream.envhub.catalogue import make_any_env
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.run.check_input import check_env
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, ids, rollout_of, turns_of
from tests.common.text.small_tokenizer import CHATML, END, FORGETS_THOUGHTS, merging_tokenizer, shop_tokenizer
from tests.envhub import agents
from tests.learner.publisher.offers import empty_offer
from tests.waiting import until

TOKENIZER = merging_tokenizer(CHATML)
VOCABULARY = len(TOKENIZER)
A, B = (ids(TOKENIZER, text)[0] for text in "ab")
COMMAND = ["/usr/bin/python3", "/opt/agent/play.py"]
DEADLINE_S = 60.0
LONG = replace(ALLOWANCE, max_tokens=1000, step_timeout_s=DEADLINE_S)


@dataclass
class Model:
    """An engine that writes "ab", which its tokenizer would encode as one token, and remembers what it wrote."""

    token_time_s: float = 0.0
    max_tokens: int = LONG.max_tokens
    written: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompts and answers

    def __post_init__(self) -> None:
        self.engine = engine_of(self._write, max_tokens=self.max_tokens, token_time_s=self.token_time_s)

    def _write(self, prompt: list[int], seed: int | None) -> list[int]:
        letter = ids(TOKENIZER, "cdefghij"[random.Random(seed).randrange(8)])
        answer = [*letter, A, B, TOKENIZER.eos_token_id]
        self.written.append((prompt, answer))
        return answer


def entry(agent: object, **options: Any) -> MixtureEntry:
    named = f"tests.envhub.agents:{agent}" if isinstance(agent, str) else agent
    return MixtureEntry(name="agent", options={"agent": named, **options})


async def played(
    options: MixtureEntry, model: Model, *, record: EpisodeRecord | None = None, template: str = CHATML, **settings: Any
) -> Trajectory:
    record = record or EpisodeRecord(attempt=attempt_on())
    settings.setdefault("allowance", LONG)
    async with fresh_env({record.attempt.task.env: options}, record.attempt.task, timeout_s=DEADLINE_S) as env:
        tokenizer = merging_tokenizer(template)
        trajectory = await rollout_of(env, model.engine, record=record, tokenizer=tokenizer, **settings)
    check(trajectory, vocab_size=VOCABULARY)
    return trajectory


def play(
    agent: object, model: Model | None = None, *, options: dict[str, Any] | None = None, **settings: Any
) -> Trajectory:
    return asyncio.run(played(entry(agent, **(options or {})), model or Model(), **settings))


def failure_of(agent: object, *, complaint: str, model: Model | None = None, **settings: Any) -> Outcome:
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        play(agent, model, **settings)
    return failed.value.outcome


def sequences(trajectory: Trajectory) -> list[str]:
    tokens = trajectory.token_array().tolist()
    stops = [*trajectory.branch_starts[1:], len(tokens)]
    return [TOKENIZER.decode(tokens[start:stop]) for start, stop in zip(trajectory.branch_starts, stops, strict=True)]


@pytest.mark.parametrize("agent", ["chats", "streams", "blocks"])
def test_an_agent_on_openais_sdk_plays_unchanged_and_keeps_every_sampled_token(agent: str) -> None:
    model = Model()
    trajectory = play(agent, model)
    assert turns_of(trajectory) == model.written
    assert trajectory.branch_starts == [0] and len(trajectory.turns) == 3
    assert TOKENIZER.encode(TOKENIZER.decode([A, B])) != [A, B]  # they would not survive being encoded again
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.DONE, Outcome.POLICY)
    assert {span.policy_version for span in trajectory.version_spans} == {4}


def test_rewards_come_with_the_last_turn_after_half_a_request_too_and_the_first_component_is_the_goal() -> None:
    trajectory = play("streams")
    assert [turn.rewards for turn in trajectory.turns] == [{"right": 0.0}] * 2 + [{"right": 0.5, "short": 0.25}]
    assert (trajectory.score, trajectory.success) == (0.5, False)
    assert play("chats").success
    assert play("returns_true").turns[-1].rewards == {"reward": 1.0}
    trajectory = play("leaves_half_a_request")
    agents.LEFT_OPEN.pop().close()
    assert trajectory.total_reward == 1.0


def test_parts_of_the_reward_get_the_columns_of_the_agents_task(tmp_path: Path) -> None:
    (path := tmp_path / "tasks.jsonl").write_text('{"index": 5, "answer": "a"}\n{"index": 6, "why": "b"}\n')
    record = EpisodeRecord(attempt=attempt_on())
    rows, agent = {"train": str(path), "held_out": str(path)}, {"agent": "tests.envhub.agents:chats"}
    play("chats", record=record, options=rows)
    assert record.columns == {"index": 5, "answer": "a", "why": None}
    function = {"x": {"part": "tests.envhub.rewards.others:compute_score"}}
    check_env(EnvConfig(name="agent", options=agent | rows, rewards=function))
    with pytest.raises(ConfigError, match=r"`env\.rewards\.x` .*\(split, index, seed\).*missing a required argument"):
        check_env(EnvConfig(name="agent", options=agent, rewards=function))


def script(folder: Path, code: str) -> dict[str, Any]:
    (folder / "play.py").write_text(agents.WITH_URLLIB + code)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"q{row}"}) + "\n" for row in range(40)))
    return {"folder": str(folder), "train": str(folder / "tasks.jsonl")}


@pytest.mark.parametrize(
    ("code", "rewards"), [(agents.REWARD, {"right": 1.0, "short": 0.5}), (agents.POSTED, {"reward": 0.25})]
)
def test_a_command_plays_from_inside_the_sandbox(readable: Path, code: str, rewards: dict[str, float]) -> None:
    model = Model()
    trajectory = play(COMMAND, model, options=script(readable, code))
    assert turns_of(trajectory) == model.written
    assert trajectory.branch_starts == [0] and len(trajectory.turns) == 2
    assert trajectory.turns[-1].rewards == rewards
    assert sequences(trajectory)[0].startswith("<|im_start|>user\nq")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        *((f"print({printed})", "the agent gave no reward") for printed in ("'no reward'", "float('nan')")),
        ("print(1); sys.exit(3)", "exit code 3"),
        ("raise LookupError('a bug')", "LookupError: a bug"),
        ("urllib.request.urlopen('http://1.1.1.1', timeout=5)", "exit code 1"),
    ],
)
def test_a_command_that_fails_is_an_env_failure(readable: Path, code: str, complaint: str) -> None:
    assert failure_of(COMMAND, complaint=complaint, options=script(readable, code)) is Outcome.ENV_FAILURE


def test_a_history_that_the_agent_rewrites_begins_a_branch_with_no_token_trained_twice() -> None:
    model = Model()
    trajectory = play("rewrites", model)
    assert sorted(turns_of(trajectory)) == sorted(model.written)
    assert len(trajectory.branch_starts) == 2
    second = trajectory.branch_starts[1]
    assert trajectory.loss_mask_array()[second:].sum() == len(model.written[2][1])


def test_a_template_that_forgets_thoughts_begins_a_branch_as_it_does_elsewhere() -> None:
    class Thinks(Model):
        def _write(self, prompt: list[int], seed: int | None) -> list[int]:
            self.written.append((prompt, [A, *ids(TOKENIZER, "</think>"), B, TOKENIZER.eos_token_id]))
            return self.written[-1][1]

    model = Thinks()
    trajectory = play("chats", model, template=FORGETS_THOUGHTS)
    assert sorted(turns_of(trajectory)) == sorted(model.written)
    assert len(trajectory.branch_starts) == 3


def test_sub_agents_at_the_same_time_are_sequences_of_their_own() -> None:
    model = Model(token_time_s=0.01)
    trajectory = play("splits", model)
    assert sorted(turns_of(trajectory)) == sorted(model.written)
    assert len(trajectory.branch_starts) == 2 and len(trajectory.turns) == 6
    assert sorted(text.split("\n")[1].removesuffix(END) for text in sequences(trajectory)) == ["left", "right"]
    assert all(text.count("<|im_start|>assistant") == 3 for text in sequences(trajectory))


def test_several_answers_to_one_prompt_are_branches_and_each_can_be_continued() -> None:
    model = Model()
    trajectory = play("chooses", model)
    assert sorted(turns_of(trajectory)) == sorted(model.written)
    assert len(trajectory.branch_starts) == 2
    assert trajectory.turns[-1].stop == trajectory.num_tokens
    assert [text.count("two") for text in sequences(trajectory)] == [1, 0]


def test_a_stop_text_ends_an_answer_after_the_token_that_completes_it() -> None:
    model = Model()
    trajectory = play("stops", model)
    (first, cut), second = turns_of(trajectory)[0], turns_of(trajectory)[1]
    assert cut == model.written[0][1][:3] and cut[1:] == [A, B]
    assert second == model.written[1]
    # The agent did not see the stop text, and the policy did write it.
    closed = [*ids(TOKENIZER, END + "\n"), *ids(TOKENIZER, "<|im_start|>user\ntwo")]
    assert second[0][: len(first) + len(cut) + len(closed)] == first + cut + closed
    assert trajectory.branch_starts == [0]


def test_tools_tool_messages_and_the_date_of_the_start_of_the_episode_reach_the_chat_template() -> None:
    content = "{{ message['content'] }}"
    calls = "{% for call in message['tool_calls'] %}{{ call['function']['arguments']['at'] }}{% endfor %}"
    tools = "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    text = sequences(play("has_tools", template=tools + CHATML.replace(content, content + calls)))[0]
    assert text.startswith("[look]<|im_start|>system\nbehave<|im_end|>")
    assert "<|im_start|>assistant\nsky<|im_end|>\n<|im_start|>tool\nblue" in text
    record = EpisodeRecord(attempt=attempt_on(), started_at_s=86_400.0)
    text = sequences(play("chats", record=record, template="{{ strftime_now('%d %b %Y') }}" + CHATML))[0]
    assert text.startswith("02 Jan 1970<|im_start|>")


@pytest.mark.parametrize(
    ("agent", "limits", "stop_reason", "reward", "num_turns"),
    [
        ("talks_on", {"max_turns": 3}, StopReason.MAX_TURNS, 0.0, 3),
        ("talks_on", {"max_tokens": 100}, StopReason.MAX_TOKENS, 0.0, 3),
        ("talks_until_refused", {"max_tokens": 100}, StopReason.MAX_TOKENS, 0.75, 3),
    ],
)
def test_an_agent_that_ends_when_a_limit_refuses_its_call_is_the_policys_own_end(
    agent: str, limits: dict[str, int], stop_reason: StopReason, reward: float, num_turns: int
) -> None:
    allowance = replace(LONG, **limits)
    trajectory = play(agent, Model(max_tokens=allowance.max_tokens), allowance=allowance)
    assert (trajectory.stop_reason, trajectory.total_reward) == (stop_reason, reward)
    assert len(trajectory.turns) == num_turns and trajectory.outcome is Outcome.POLICY


@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        ("raises", r"LookupError: a bug of the agent \(agents.py:\d+\)"),
        ("fails_after_a_refusal_that_it_expected", "LookupError: a bug of the agent"),
        ("hangs", r"neither requested a generation nor ended within 1\.0 s"),
        ("exits", "SystemExit: 3"),
        ("is_interrupted", "KeyboardInterrupt"),
        ("cancels_itself", "awaited something that was cancelled"),
        ("returns_infinity", "returned reward 'reward' = inf"),
        ("returns_text", "returned reward 'reward' = '1.0'"),
        ("returns_a_list", "returned reward 'reward' = a list"),
        ("returns_a_coroutine", "declare the function itself as `async def`"),
        ("returns_nothing", "the agent gave no reward"),
        ("returns_an_empty_dict", "ended without a reward"),
        *((agent, "ended before any generation was complete") for agent in ("asks_nothing", "talks_too_much_at_first")),
    ],
)
def test_a_failure_of_the_agent_is_an_env_failure_and_never_a_reward_of_0(agent: str, complaint: str) -> None:
    allowance = replace(ALLOWANCE, step_timeout_s=1.0 if agent == "hangs" else DEADLINE_S)
    model = Model(max_tokens=allowance.max_tokens)
    assert failure_of(agent, complaint=complaint, model=model, allowance=allowance) is Outcome.ENV_FAILURE


def test_calls_that_an_sdk_gives_up_and_repeats_are_aborted_and_neither_recorded_nor_counted() -> None:
    """Each second call is answered in time; the episode has as many turns as it may."""
    model = Model(token_time_s=0.01)
    write = model.engine._script
    model.engine._script = lambda prompt, seed: write(prompt, seed) * (len(model.written) % 2 * 99 + 1)
    trajectory = play("tries_again", model, allowance=replace(LONG, max_turns=2))
    assert turns_of(trajectory) == model.written[1::2] and len(model.written) == 4
    assert (trajectory.stop_reason, trajectory.total_reward) == (StopReason.DONE, 1.0)
    assert model.engine.load().num_running == 0


def test_an_agent_that_waits_for_no_answer_has_no_reward() -> None:
    model, complaint = Model(token_time_s=0.1), r"did not wait for 5 answers; give it a longer timeout"
    allowance = replace(LONG, max_turns=1)
    assert failure_of("never_waits", complaint=complaint, model=model, allowance=allowance) is Outcome.ENV_FAILURE


def cut(options: MixtureEntry, model: Model, *, when: Callable[[EpisodeRecord], bool]) -> Trajectory:
    record = EpisodeRecord(attempt=attempt_on())

    async def begin() -> None:
        playing = asyncio.create_task(played(options, model, record=record))
        await until(lambda: when(record) and model.engine.load().num_running > 0, "the turns")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(begin())
    partial = record.partial()
    check(partial, vocab_size=VOCABULARY)
    return partial


@pytest.mark.parametrize(("agent", "num_turns"), [("chats", 2), ("splits", 3), ("chooses", 2)])
def test_a_preempted_episode_continues_with_the_tokens_that_were_sampled(agent: str, num_turns: int) -> None:
    partial = cut(entry(agent), Model(token_time_s=0.02), when=lambda record: len(record.turns) >= num_turns)
    kept = turns_of(partial)
    model = Model()
    resumed = play(agent, model, record=resumed_record(attempt_on(), partial))
    assert sorted(turns_of(resumed)) == sorted(kept + model.written)
    assert len(resumed.turns) == len(play(agent).turns) and resumed.total_reward == 1.0


def test_an_agent_that_does_not_repeat_its_calls_cannot_be_continued() -> None:
    for before, after, num_missing in (("never_repeats", "never_repeats", 2), ("chats", "asks_once", 1)):
        partial = cut(entry(before), Model(token_time_s=0.02), when=lambda record: len(record.turns) == 2)
        record, allowance = resumed_record(attempt_on(), partial), replace(LONG, step_timeout_s=1.0)
        complaint = f"{num_missing} of its 2 recorded prompts were not sent again"
        failure = failure_of(after, complaint=complaint, record=record, allowance=allowance)
        assert failure is Outcome.REPLAY_MISMATCH


async def test_64_episodes_at_once_keep_apart_while_the_weights_change_in_mid_call() -> None:
    model = Model(token_time_s=0.25)
    records = [EpisodeRecord(attempt=replace(attempt_on(index), member=index)) for index in range(64)]
    playing = [asyncio.create_task(played(entry("chats"), model, record=record)) for record in records]
    await until(lambda: model.engine.load().num_running == 64, "the calls of all")
    await asyncio.sleep(0.4)  # of the second that a call takes
    await model.engine.stage(empty_offer(5))
    await model.engine.commit(5)
    trajectories = await asyncio.gather(*playing)
    assert sorted(turn for trajectory in trajectories for turn in turns_of(trajectory)) == sorted(model.written)
    for index, trajectory in enumerate(trajectories):
        assert trajectory.branch_starts == [0] and len(trajectory.turns) == 3
        assert f"task {index}{END}" in sequences(trajectory)[0]
        assert trajectory.version_spans[-1].policy_version == 5
    spans = [trajectory.version_spans[:2] for trajectory in trajectories]
    assert any((one.policy_version, other.policy_version, one.stop) == (4, 5, other.start) for one, other in spans)


def made_shops(module: str, monkeypatch: pytest.MonkeyPatch) -> list[ShopEnv]:
    """The shops that the agent of this module makes, as it makes them."""
    shops: list[ShopEnv] = []

    def made(**options: Any) -> ShopEnv:
        shops.append(ShopEnv(**options))
        return shops[-1]

    monkeypatch.setattr(f"{module}.ShopEnv", made)
    return shops


def test_the_agent_of_the_page_shops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    code, settings = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shop_agent.py").write_text(code)
    (tmp_path / "shop_agent.yaml").write_text(settings)
    monkeypatch.syspath_prepend(tmp_path)
    shops = made_shops("shop_agent", monkeypatch)
    tokenizer = shop_tokenizer()

    def buys(prompt: list[int], seed: int | None) -> list[int]:
        return ids(tokenizer, shops[-1].expert() + tokenizer.eos_token)

    config = load_config(None, [], presets=[str(tmp_path / "shop_agent.yaml")])
    env = make_any_env(config.env.name, config.env.options)
    trajectory = asyncio.run(rollout_of(env, engine_of(buys), tokenizer=tokenizer))
    assert trajectory.success and len(trajectory.turns) > 2 and trajectory.branch_starts == [0]


def test_the_example_s_modules_are_sequences_of_one_policy_for_one_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    shops, prompts, written = made_shops("docs.examples.modules_agent", monkeypatch), list[str](), list[str]()

    def speaks(prompt: list[int], seed: int | None) -> list[int]:
        prompts.append(TOKENIZER.decode(prompt))
        written.append(shops[-1].expert() if "You act." in prompts[-1] else f"thought {len(written)}!")
        return [*ids(TOKENIZER, written[-1]), TOKENIZER.eos_token_id]

    engine = engine_of(speaks, max_tokens=4000)

    def episode(index: int) -> Trajectory:
        attempt = replace(attempt_on(), task=Task(env="agent", split="train", index=index))
        env = make_any_env("agent", {"agent": "docs.examples.modules_agent:play"})
        allowance = replace(LONG, max_turns=40, max_tokens=4000)
        record = EpisodeRecord(attempt=attempt)
        return asyncio.run(rollout_of(env, engine, record=record, tokenizer=TOKENIZER, allowance=allowance))

    first, num_first, second = episode(0), len(prompts), episode(1)
    for trajectory, num_calls in ((first, num_first), (second, len(prompts) - num_first)):
        check(trajectory, vocab_size=VOCABULARY)
        assert trajectory.success and len(trajectory.turns) == len(trajectory.branch_starts) == num_calls
    thoughts = [text for text in written[:num_first] if text.startswith("thought")]
    assert any(text in prompt for text in thoughts for prompt in prompts[:num_first])
    assert not any(text in prompt for text in thoughts for prompt in prompts[num_first:])


def test_a_folder_that_the_sandbox_cannot_show_is_refused(readable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    readable.chmod(0o700)
    with pytest.raises(ValueError, match="must be readable by every user"):
        make_any_env("agent", {"agent": COMMAND, "folder": str(readable)})


def seen_tasks(options: dict[str, Any], split: str) -> set[str]:
    env = make_any_env("agent", {"agent": "tests.envhub.agents:chats", **options})
    rows = [env.columns(Task(env="agent", split=split, index=index)) for index in range(40)]
    return {json.dumps(row, sort_keys=True) for row in rows}


def test_tasks_are_the_lines_of_a_file_that_all_share_or_have_seeds_and_the_splits_share_none(tmp_path: Path) -> None:
    options = {"train": script(tmp_path, "")["train"]}
    one, other = (make_any_env("agent", {"agent": "tests.envhub.agents:chats", **options}) for _ in range(2))
    assert isinstance(one, AgentEnv) and isinstance(other, AgentEnv) and one._rows is other._rows
    train, held_out = seen_tasks(options, "train"), seen_tasks(options, "held_out")
    assert not train & held_out and len(train | held_out) == 40 and held_out
    (tmp_path / "other.jsonl").write_text('{"question": "q"}\n')
    assert seen_tasks(options | {"held_out": str(tmp_path / "other.jsonl")}, "held_out") == {'{"question": "q"}'}
    seeds = [json.loads(row)["seed"] for split in ("train", "held_out") for row in seen_tasks({}, split)]
    assert len(set(seeds)) == 80


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"agent": "tests.envhub.agents:nobody"}, "tests.envhub.agents has no nobody"),
        ({"agent": "tests.envhub.agents:NUMBER"}, "NUMBER must be a function, got int"),
        *(({"agent": agent}, "must be module:function, or a command as a list of words") for agent in ("play.py", [])),
        ({"agent": ["a", 3]}, "must be a text or a list of texts"),
        ({"agent": ["a"], "folder": "/no/such"}, "must be a directory"),
        ({"agent": "tests.envhub.agents:chats", "folder": "/tmp"}, "for an agent that is a command"),
        ({"agent": "tests.envhub.agents:chats", "train": "/no/such"}, "does not exist; give the path of a .jsonl file"),
        ({"agent": "tests.envhub.agents:chats", "held_out": "a.jsonl"}, "`env.options.train` must be set"),
        ({"agents": "tests.envhub.agents:chats"}, "its options are: agent, train, held_out, folder"),
    ],
)
def test_options_that_do_not_fit_are_refused_when_it_is_made(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_any_env("agent", options)
