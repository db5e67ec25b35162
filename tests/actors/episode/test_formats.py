"""Formats of actions: a user's own from a few lines, predictions, calls of tools; each with every context policy."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.answer import parsed
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.records.tool_call import ParsedAnswer, ToolCall
from slipstream.common.records.trajectory import StopReason, Task, Trajectory, check
from slipstream.common.text.action_format import ACT, FORMATS, ActionFormat, ParsedAction, action_format, called
from slipstream.common.text.chat import SUMMARISE, SUMMARY, reply_form
from slipstream.common.text.transcript import Fidelity, Transcriber
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode
from slipstream.envhub.rewards.measures import prediction
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import sequences_of
from slipstream.tools.run.check_input import check_env, check_input
from slipstream.tools.run.prepare import demonstrate
from tests.actors.episode.episodes import attempt_on, engine_of, ids, play, rollout_of, timeless
from tests.common.text.chat_templates import family_tokenizer
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.envhub.rewards.test_rewards import episode_of, turn_of

OWN = {
    "marks": {"write": "<act>{action}</act>"},
    "pattern": {"instructions": "End with ACT: and an action.", "write": "ACT: {action}", "pattern": "ACT ?: (.+)"},
}
NAMES = [*FORMATS, *OWN, "tests.actors.episode.test_formats:Bare", "tools"]
CONTEXTS = ["stop", "window", "summary", "tests.actors.episode.test_formats:newest"]
FAMILIES = ["qwen2.5", "llama3", "gemma"]  # gemma refuses system messages
WITH_TOOLS = ["qwen2.5", "qwen3"]  # their templates show tools


def rotated(names: list[str], others: list[str]) -> list[Any]:
    """Every name with every other and each of its families: one of them in CI, in turn, and the rest as `long`."""
    return [
        pytest.param(name, other, family, marks=[] if (row + column) % len(families) == place else pytest.mark.long)
        for row, name in enumerate(names)
        for column, other in enumerate(others)
        for families in [WITH_TOOLS if name == "tools" else FAMILIES]
        for place, family in enumerate(families)
    ]


ROOMY = Allowance(max_turns=30, max_tokens=20_000, step_timeout_s=60, episode_timeout_s=600)
CONTEXT_TOKENS, TURNS = 1000, 24
WORDS = ["search[plain dress]", "click[plain dress 10]", *["click[grey]", "click[green]"] * 50]


class Bare:
    instructions = "Write do and your action."

    def write(self, action: str) -> str:
        return f"do {action}"

    def parse(self, completion: str) -> ParsedAction:
        _, found, action = completion.partition("do ")
        return ParsedAction(text=action.strip(), valid=bool(found))


def newest(messages: Sequence[Message]) -> list[Message]:
    return [messages[0], *messages[-3:]] if messages[0].role == "system" else [*messages[-3:]]


def own_format(**changes: Any) -> ActionFormat:
    return action_format("mine", {"mine": changes})


def test_a_format_of_a_few_lines_of_yaml_is_accepted_and_read(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    own = "{instructions: 'End with: ACT: your action', write: 'ACT: {action}', pattern: 'ACT ?: (.+)'}"
    path.write_text(f"env:\n  action_format: pattern\n  formats:\n    pattern: {own}\n")
    config = load_config(str(path), [])
    check_env(config.env)
    made = action_format(config.env.action_format, config.env.formats)
    assert made.instructions == "End with: ACT: your action"
    assert made.parse("I think so.\nACT: click[a]\nno\nACT : click[b] ") == ParsedAction(text="click[b]", valid=True)
    assert made.parse("click[a]") == made.parse("") == ParsedAction(text="", valid=False)


def test_marks_alone_make_the_instructions_and_the_parser() -> None:
    made = own_format(write="<act>{action}</act>")
    assert made.instructions == "Write exactly one action as <act>your action</act>."
    assert made.parse("no <act> a </act> but < act >b</ act>").text == "b"
    assert own_format(write="{action}", instructions="Write the action alone.").parse(" a ").text == "a"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("text", r"`env.formats.mine` must be texts by name \(instructions, write, pattern\), got 'text'"),
        ({"write": 3}, "must be texts by name"),
        ({"wrte": "{action}"}, "unknown key `env.formats.mine.wrte`; did you mean write"),
        ({}, r"`env.formats.mine.write` must be a text with \{action\} in it once, got ''"),
        ({"write": "{action}{action}"}, "in it once"),
        ({"write": "ACT: {action}"}, "must be a text with marks before and after .* or add `pattern`"),
        ({"write": "{action}\n"}, "must be a text with marks before and after"),
        ({"write": "a {action}", "pattern": "a (.+"}, "must be a regular expression, got .*: missing"),
        ({"write": "a {action}", "pattern": "a .+"}, "must be a pattern with one group"),
        ({"write": "a {action}", "pattern": "(a) (.+)"}, "must be a pattern with one group"),
        ({"write": "a {action}", "pattern": "b (.+)"}, r"must be a format that reads 'click\[red\]' from 'a click"),
        ({"write": "a {action}", "pattern": "(?:(?:a+)+b|a )(.+)"}, "took more than 1 s for a text of"),
    ],
    ids=str,
)
def test_a_format_that_cannot_be_used_is_refused_with_its_key(given: Any, complaint: str) -> None:
    config = load_config(None, [])
    config.env.formats = {"mine": given}
    with pytest.raises(ConfigError, match=complaint):
        check_env(config.env)
    for taken_or_malformed in ("plain", "tools", "my format", "a:b"):
        config.env.formats = {taken_or_malformed: OWN["marks"]}
        with pytest.raises(ConfigError, match=r"`env\.(formats|action_format)`"):
            check_env(config.env)


class Mute(Bare):
    instructions = None  # type: ignore[assignment]


class Deaf(Bare):
    def parse(self, completion: str) -> ParsedAction:
        return super().parse(completion) if completion else None  # type: ignore[return-value]


class Doubtful(Bare):
    def parse(self, completion: str) -> ParsedAction:
        return ParsedAction(text=super().parse(completion).text, valid=False)


class Dear(Bare):
    def __init__(self, price: int) -> None: ...


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Mute, "has the instructions None and reads Parsed.* from an empty text"),
        (Deaf, "has the instructions 'Write .*' and reads None from an empty text"),
        (Doubtful, "reads .*, valid=False"),
        (Dear, "failed: TypeError"),
    ],
)
def test_a_class_that_is_no_format_is_refused(kind: type, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^`env.action_format` '{__name__}:{kind.__name__}' {complaint}"):
        action_format(f"{__name__}:{kind.__name__}", {})


def test_a_pattern_that_a_reply_makes_slow_fails_the_episode_and_is_not_blamed_on_the_policy() -> None:
    slow = own_format(write="a {action}", pattern=r"(?:(?:q+)+x|a )(.+)")
    with pytest.raises(EnvError, match=r"`env.action_format` failed: .*`env.formats.mine.pattern` took more than 1 s"):
        parsed(slow, "q" * 5000)


@dataclass
class Walker:
    """A policy that walks through the shop for ever, and writes a summary when it is asked for one."""

    tokenizer: PreTrainedTokenizerBase
    write: Callable[[str], str]
    num_actions: int = 0
    max_tokens: int = CONTEXT_TOKENS
    prompts: list[str] = field(default_factory=list)
    num_sampled: int = 0

    def answer(self, prompt: list[int], seed: int | None) -> list[int]:
        self.prompts.append(self.tokenizer.decode(prompt))
        if SUMMARISE in self.prompts[-1]:
            text = f"I walked {self.num_actions} steps."
        else:
            text = self.write(WORDS[self.num_actions])
            self.num_actions += 1
        tokens = ids(self.tokenizer, text + reply_form(self.tokenizer).ends["user"])
        self.num_sampled += min(len(tokens), self.max_tokens - len(prompt))
        return tokens


async def parse_hermes(text: str, *, tokens: list[int], prompt: list[int], tools: list[dict[str, Any]]) -> ParsedAnswer:
    """Calls between marks, as Qwen's. vLLM's own parser is tried in tests/actors/episode/test_tool_calls.py."""
    found = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", text)]
    calls = [ToolCall(name=call["name"], arguments=json.dumps(call["arguments"])) for call in found]
    known = {tool["function"]["name"] for tool in tools}
    malformed = any(call.name not in known for call in calls)
    return ParsedAnswer(reasoning="", content="", tool_calls=calls, malformed=malformed)


def call_of(action: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'act', 'arguments': {'action': action}})}</tool_call>"


def walked(name: str, walker: Walker, model: ModelConfig, record: EpisodeRecord, max_turns: int = TURNS) -> Trajectory:
    allowance = replace(ROOMY, max_turns=max_turns, max_tokens=walker.max_tokens, model=model)
    settings: dict[str, Any] = {"action_format": action_format(name, OWN), "allowance": allowance}
    settings |= {"record": record, "tokenizer": walker.tokenizer, "parse": parse_hermes}
    return asyncio.run(rollout_of(ShopEnv(), engine_of(walker.answer, max_tokens=walker.max_tokens), **settings))


@pytest.mark.parametrize(("name", "context", "family"), rotated(NAMES, CONTEXTS))
def test_each_format_plays_and_resumes_with_every_context(name: str, context: str, family: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(family, tmp_path)
    model = ModelConfig(context=context, max_tokens=CONTEXT_TOKENS)
    model.roles = "alternate" if family == "gemma" else "as_sent"
    made = action_format(name, OWN)
    write = call_of if name == "tools" else made.write
    walker, attempt = Walker(tokenizer, write), attempt_on(max_turn_tokens=120)
    whole = walked(name, walker, model, EpisodeRecord(attempt=attempt))
    check(whole, vocab_size=len(tokenizer))
    assert all(turn.valid_action for turn in whole.turns[:-1])  # the end of the context may cut the last reply
    sampled = sum(int(sequence.loss_mask.sum()) for sequence in sequences_of(whole, advantage=1.0))
    assert sampled == walker.num_sampled == sum(span.stop - span.start for span in whole.version_spans)
    assert all(made.instructions in prompt for prompt in walker.prompts) or context.endswith(":newest")
    assert ("the action, as text" in walker.prompts[-1]) is (name == "tools")
    if context == "stop":
        assert (whole.stop_reason, whole.branch_starts) == (StopReason.MAX_TOKENS, [0])
    else:
        assert (whole.stop_reason, len(whole.turns)) == (StopReason.MAX_TURNS, TURNS) and len(whole.branch_starts) > 1
    ends = [place for place, turn in enumerate(whole.turns, start=1) if turn.stop in whole.branch_starts]
    for num_turns in {2, len(whole.turns) - 1, *ends[:2], *(end - 1 for end in ends[:2])} - {0}:
        record = EpisodeRecord(attempt=attempt)
        first = Walker(tokenizer, write)
        walked(name, first, model, record, max_turns=num_turns)
        second = Walker(tokenizer, write, num_actions=first.num_actions)
        assert timeless(walked(name, second, model, resumed_record(attempt, record.partial()))) == timeless(whole)


def test_a_summary_is_sampled_and_trained_and_begins_a_branch_with_task_and_newest_answer(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("llama3", tmp_path)
    model = ModelConfig(context="summary", max_tokens=CONTEXT_TOKENS)
    walker = Walker(tokenizer, FORMATS["action_tag"].write)
    whole = walked("action_tag", walker, model, EpisodeRecord(attempt=attempt_on(max_turn_tokens=120)))
    asked = [place for place, prompt in enumerate(walker.prompts) if SUMMARISE in prompt]
    assert len(asked) >= 2 and len(whole.branch_starts) == len(asked) + 1
    for place in asked:
        turn, text = whole.turns[place], walker.prompts[place + 1]
        assert (turn.state_key, turn.rewards, turn.valid_action) == ("", {"purchase": 0.0}, True)
        assert tokenizer.decode(whole.token_array()[turn.start : turn.stop]).startswith("I walked ")
        assert whole.loss_mask_array()[turn.start : turn.stop].all()
        assert turn.stop in whole.branch_starts
        assert text.count(SUMMARY) == 1 and text.count("I walked ") == 1 and SUMMARISE not in text
    assert all(turn.state_key for place, turn in enumerate(whole.turns) if place not in asked)
    read = Transcriber(tokenizer, model=model).read(whole)
    assert read.fidelity is Fidelity.NONE and len(read.turns) == TURNS


@pytest.mark.parametrize("name", [*FORMATS, "marks", "tools"])
def test_admissible_actions_end_every_observation_and_nothing_else_changes(name: str, tmp_path: Path) -> None:
    tokenizer, env = family_tokenizer("qwen2.5", tmp_path), make_env("household", {})
    made, prompts, choices = action_format(name, OWN), list[str](), list[list[str]]()

    def acts(prompt: list[int], seed: int | None) -> list[int]:
        prompts.append(tokenizer.decode(prompt))
        choices.append(env.admissible() or [])
        text = call_of(env.expert()) if name == "tools" else made.write(env.expert())
        return ids(tokenizer, text + reply_form(tokenizer).ends["user"])

    task = Task(env="household", split="train", index=3)
    record = EpisodeRecord(attempt=replace(attempt_on(max_turn_tokens=200), task=task))
    settings: dict[str, Any] = {"record": record, "tokenizer": tokenizer, "action_format": made, "parse": parse_hermes}
    settings["allowance"] = replace(ROOMY, shows_admissible=True)
    whole = asyncio.run(rollout_of(env, engine_of(acts, max_tokens=20_000), **settings))
    assert whole.success and all(turn.valid_action for turn in whole.turns)
    for prompt, possible in zip(prompts, choices, strict=True):
        assert prompt.rpartition("Possible actions: ")[2].startswith("; ".join(possible))
    assert prompts[-1].count("Possible actions: ") == len(prompts)
    assert not any("Possible actions" in message.content for message in record.exchanges[-1].answer)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["env.name=tools", "env.options.profile=small"], "tools: it does not list its actions"),
        (["env.name=agent", "env.options.agent=a:b"], "agent: it plays its episodes itself"),
    ],
)
def test_an_environment_that_lists_no_actions_is_refused_before_the_start(overrides: list[str], complaint: str) -> None:
    config = load_config(None, ["env.show_admissible=true", *overrides])
    with pytest.raises(ConfigError, match=rf"`env\.show_admissible` must be false for `env\.name` {complaint}"):
        check_template(config, shop_tokenizer())
    check_template(load_config(None, ["env.show_admissible=true"]), shop_tokenizer())


def test_a_malformed_call_is_answered_and_counts_as_an_invalid_action(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen2.5", tmp_path)
    bad = ["click[red]", call_of("click[red]") * 2, '<tool_call>{"name": "no", "arguments": {}}</tool_call>']
    good = call_of("search[plain dress]")
    texts = iter([*bad, '<tool_call>{"name": "act", "arguments": {"action": 3}}</tool_call>', good])
    walker = Walker(tokenizer, lambda _: next(texts), max_tokens=4000)
    record = EpisodeRecord(attempt=attempt_on(max_turn_tokens=200))
    whole = walked("tools", walker, ModelConfig(), record, max_turns=5)
    assert [turn.valid_action for turn in whole.turns] == [False] * 4 + [True]
    for exchange in record.exchanges[:4]:
        assert exchange.action == ""
        (message,) = exchange.answer
        assert message.role == "user" and message.content.startswith("The reply must contain exactly one valid call")
    assert [message.role for message in record.exchanges[4].answer] == ["tool"]
    assert "<tool_response>" not in walker.prompts[-1] and record.exchanges[4].action == "search[plain dress]"


def test_the_tools_of_an_environment_are_shown_and_its_calls_arrive_as_json(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen2.5", tmp_path)
    env, prompts = make_env("tools", {"profile": "small"}), list[str]()

    def solves(prompt: list[int], seed: int | None) -> list[int]:
        prompts.append(tokenizer.decode(prompt))
        action = env.expert()
        call = action if action.startswith("{") else '{"name": "done", "arguments": {}}'
        return [*ids(tokenizer, f"<tool_call>{call}</tool_call>"), tokenizer.eos_token_id]

    attempt = replace(attempt_on(max_turn_tokens=500), task=Task(env="tools", split="train", index=0))
    settings: dict[str, Any] = {"action_format": action_format("tools"), "allowance": ROOMY, "parse": parse_hermes}
    whole = play(env, engine_of(solves, max_tokens=20_000), attempt=attempt, tokenizer=tokenizer, **settings)
    assert whole.success and all(turn.valid_action for turn in whole.turns)
    assert '"name": "done"' in prompts[0] and ACT["function"]["description"] not in prompts[0]


def calling(arguments: str) -> ParsedAnswer:
    calls = [ToolCall(name="act", arguments=arguments)]
    return ParsedAnswer(reasoning="", content="", tool_calls=calls, malformed=False)


@pytest.mark.parametrize(
    ("arguments", "action"), [('{"action": " a "}', "a"), ('{"action": ""}', ""), ('{"act": "a"}', ""), ("{}", "")]
)
def test_the_action_of_a_call_is_its_text(arguments: str, action: str) -> None:
    assert called(calling(arguments), as_text=True) == ParsedAction(text=action, valid=bool(action))
    assert called(calling('{"a": "\\ud800"}'), as_text=False).text == '{"name": "act", "arguments": {"a": "\ufffd"}}'


def test_a_call_that_is_nested_too_deeply_for_the_stack_of_the_actor_is_no_action() -> None:
    def within(num_frames: int) -> ParsedAction:
        if num_frames:
            return within(num_frames - 1)
        return called(calling(f'{{"action": {"[" * 700}{"]" * 700}}}'), as_text=False)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; Hypothesis leaves a higher one in a process that ran its tests
    try:
        assert within(0).valid and not within(500).valid
    finally:
        sys.setrecursionlimit(limit)


def test_tools_need_a_parser_a_template_that_shows_them_and_no_expert(tmp_path: Path) -> None:
    tools = ["env.action_format=tools", "warm_start.episodes=0"]
    with pytest.raises(ConfigError, match=r"`model\.tool_parser` must be a parser of vLLM with env.action_format="):
        load_config(None, tools)
    tools.append("model.tool_parser=hermes")
    with pytest.raises(ConfigError, match=r"`warm_start\.episodes` must be 0 with env.action_format=tools"):
        load_config(None, [*tools, "warm_start.episodes=5"])
    config = load_config(None, tools)
    check_input(config)
    with pytest.raises(ConfigError, match="does not show tools"):
        check_template(load_config(None, [*tools, "model.roles=alternate"]), shop_tokenizer())
    with pytest.raises(ConfigError, match="is not possible for a tiny model, a warm start or an expert"):
        config.warm_start.episodes = 1
        list(demonstrate(config, shop_tokenizer()))
    check_template(config, family_tokenizer("qwen2.5", tmp_path))


@pytest.mark.parametrize(("name", "context", "family"), rotated(NAMES[:-1], ["summary"]))  # without "tools"
def test_a_warm_start_writes_every_format_as_it_is_read(name: str, context: str, family: str, tmp_path: Path) -> None:
    sizes = ["warm_start.episodes=2", "model.max_tokens=6000", "learner.micro_batch_tokens=6000", "env.max_turns=8"]
    config = load_config(None, [*sizes, f"model.context={context}"])
    config.env.formats, config.env.action_format = OWN, name
    config.model.roles = "alternate" if family == "gemma" else "as_sent"
    tokenizer = family_tokenizer(family, tmp_path)
    for episode in demonstrate(config, tokenizer):
        assert episode.success and all(turn.valid_action for turn in episode.turns)
        text = tokenizer.decode(episode.token_array())
        assert text.count("<expect>") == (len(episode.turns) + 1 if name == "outcome" else 0)


def test_a_demonstrated_prediction_is_the_answer_that_comes() -> None:
    config = load_config(None, ["warm_start.episodes=3", "env.action_format=outcome", "model.max_tokens=2000"])
    tokenizer = shop_tokenizer("outcome")
    for episode in demonstrate(config, tokenizer):
        read = Transcriber(tokenizer).read(episode)
        assert read.fidelity is Fidelity.TOKENS
        replies = [message.content for message in read.messages if message.role == "assistant"]
        answers = [message.content for message in read.messages if message.role == "user"][1:]
        scores = prediction(exchanged(replies, answers))
        assert isinstance(scores, list) and min(scores) > 0.5


def exchanged(replies: Sequence[str], answers: Sequence[str]) -> Episode:
    return episode_of(*(turn_of(reply, answer=answer) for reply, answer in zip(replies, answers, strict=False)))


def test_a_prediction_is_scored_by_the_words_that_it_shares_with_the_answer() -> None:
    replies = ["<expect>red mug</expect>", "<expect>A, red! bowl</expect> <expect>", "<expect></expect>", "a red bowl"]
    assert prediction(exchanged(replies, ["a red bowl"] * 4)) == [0.4, 1.0, 0.0, 0.0]
