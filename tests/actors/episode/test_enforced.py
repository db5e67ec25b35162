"""Enforced actions: each is sampled among those that are possible, and the learner's softmax has the same tokens."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from slipstream.actors.engine.engine import Completion, Restriction, widest
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.resume import resumed_record
from slipstream.actors.episode.rollout import EpisodeFailed, rollout
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling, StopReason, Trajectory
from slipstream.common.text.action_format import ActionFormat, action_format
from slipstream.common.text.chat import ChatRules
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.soak.scripted_engine import allowed_tokens
from slipstream.tools.run.check_input import check_env
from slipstream.tools.run.prepare import vocabulary_texts
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, completion_of, failure_of, ids, play
from tests.common.text.chat_templates import family_tokenizer
from tests.common.text.small_tokenizer import CHATML, END, byte_tokenizer, shop_tokenizer
from tests.tools.run.tiny_model import FLOAT32, without_absent

ENFORCED = replace(ALLOWANCE, enforces_admissible=True)
LONG = replace(ENFORCED, max_tokens=20_000)
YAML = {
    "marks": {"write": "<act>{action}</act>"},
    "pattern": {"instructions": "End with ACT: and an action.", "write": "ACT: {action}", "pattern": "ACT ?: (.+)"},
    "alone": {"instructions": "Write the action alone.", "write": "{action}"},
}


class Listing(ShopEnv):
    def __init__(self, *actions: Any) -> None:
        super().__init__()
        self.actions, self.got = list(actions), list[str]()

    def admissible(self) -> list[str]:
        return self.actions or super().admissible()

    async def step(self, action: str) -> Any:
        possible = {"".join(each.split()) for each in self.admissible()}
        self.got.append(action if "".join(action.split()) in possible else f"not possible: {action}")
        return await super().step(action)


class Writer:
    """Samples as vLLM does: it writes `thought(turn)` up to a text of `stops`, and the choice that `seed` picks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thought: Callable[[int], str]) -> None:
        self._tokenizer, self._thought = tokenizer, thought
        self._end = sorted(end_tokens(tokenizer))[0]
        self.seeds = list[int | None]()
        self.restrictions = list[Restriction]()
        self._num_turns, self._rest = 0, list[int]()

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, seed: int | None = None, restriction: Restriction | None = None
    ) -> Completion:
        assert restriction is not None and seed is not None
        self.seeds.append(seed)
        self.restrictions.append(restriction)
        kept = None
        if restriction.choices:
            written = [*restriction.choices[seed % len(restriction.choices)], self._end][: sampling.max_turn_tokens]
            allowed = allowed_tokens(restriction.choices, written, ends=[self._end])
            kept = kept_sets([list(tokens) for tokens in allowed])
            self._rest = []
        else:
            if not self._rest:
                self._rest = ids(self._tokenizer, self._thought(self._num_turns))
                self._num_turns += 1
            written = []
            while self._rest and len(written) < sampling.max_turn_tokens:
                written.append(self._rest.pop(0))
                if any(stop in self._tokenizer.decode(written) for stop in restriction.stops):
                    break
        is_whole = written[-1] == self._end or len(written) < sampling.max_turn_tokens
        reason = "stop" if is_whole else "length"
        return completion_of(written, [-0.5] * len(written), kept=kept, policy_version=3, finish_reason=reason)


def enforced_episode(
    env: ShopEnv, writer: Writer, made: ActionFormat, tokenizer: PreTrainedTokenizerBase, *, max_turn_tokens: int = 200
) -> Trajectory:
    attempt = attempt_on(max_turn_tokens=max_turn_tokens)
    return play(env, writer, attempt=attempt, tokenizer=tokenizer, action_format=made, allowance=LONG)


# --- Choices.


def test_what_may_follow_each_token_is_what_continues_a_choice() -> None:
    choices = [[5, 6], [5, 6, 7], [8]]
    assert allowed_tokens(choices, [5, 6, 7, 1], ends=[1, 2]) == [{5, 8}, {6}, {1, 2, 7}, {1, 2}]
    assert allowed_tokens(choices, [5, 6, 2], ends=[1, 2]) == [{5, 8}, {6}, {1, 2, 7}]
    assert widest(choices, ends=[1, 2]) == 3
    for wrong in ([6], [5, 1], [8, 8], [8, 1, 1]):
        with pytest.raises(ValueError, match="is in none of the choices"):
            allowed_tokens(choices, wrong, ends=[1, 2])


# --- Episodes.


@pytest.mark.parametrize("family", ["words", "bytes", "qwen2.5", "llama3"])
@pytest.mark.parametrize("name", ["plain", "action_tag", "react", "outcome", *YAML])
def test_every_action_of_an_episode_is_one_of_those_that_were_possible(name: str, family: str, tmp_path: Path) -> None:
    made = action_format(name, YAML)
    if family == "words":
        tokenizer = word_tokenizer(tmp_path, name)
    else:
        tokenizer = byte_tokenizer(CHATML) if family == "bytes" else family_tokenizer(family, tmp_path)
    opening = made.write("|").partition("|")[0].rstrip()
    env, writer = Listing(), Writer(tokenizer, lambda turn: f"find plain dress {opening} no")
    episode = enforced_episode(env, writer, made, tokenizer)
    assert episode.stop_reason in (StopReason.DONE, StopReason.MAX_TURNS)
    assert env.got and not [action for action in env.got if action.startswith("not possible")]
    assert all(turn.valid_action and turn.finish_reason == "stop" for turn in episode.turns)
    assert len(set(writer.seeds)) == len(writer.seeds)
    assert episode.kept is not None
    sampled = np.flatnonzero(episode.loss_mask_array()).tolist()
    counts = dict(zip(sampled, episode.kept.count_array().tolist(), strict=True))
    for turn in episode.turns:
        text = tokenizer.decode(episode.token_array()[turn.start : turn.stop])
        free = [place for place in range(turn.start, turn.stop) if not counts[place]]
        assert free == list(range(turn.start, turn.start + len(free))), "what is chosen comes last"
        assert text.startswith("find plain dress") == bool(free) == bool(opening)
        assert counts[turn.stop - 1] == 1, "after the only choice that is left, the turn ends"


def word_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a tiny model: one token per word and no spaces."""
    texts = vocabulary_texts(EnvConfig(max_turns=8, action_format=name, formats=YAML, show_admissible=True), 60)
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    make_tiny_model(folder, texts=texts, shape=shape, max_tokens=256, seed=0)
    return AutoTokenizer.from_pretrained(folder)


def test_a_turn_that_ends_without_a_mark_has_no_action_and_no_kept_set() -> None:
    tokenizer, made = byte_tokenizer(CHATML), action_format("action_tag")
    texts = iter([f"I do not know{END}", "so <action>x"])
    episode = enforced_episode(Listing(), Writer(tokenizer, lambda turn: next(texts, f"no{END}")), made, tokenizer)
    assert [turn.valid_action for turn in episode.turns[:3]] == [False, True, False]
    assert episode.kept is not None
    assert not episode.kept.count_array()[: episode.turns[0].stop - episode.turns[0].start].any()
    nothing = enforced_episode(Listing(), Writer(tokenizer, lambda turn: f"no{END}"), made, tokenizer)
    assert nothing.kept is None and not any(turn.valid_action for turn in nothing.turns)


def test_a_thought_that_names_the_mark_is_no_action(tmp_path: Path) -> None:
    tokenizer, made = family_tokenizer("qwen2.5", tmp_path), action_format("action_tag")
    env = Listing()
    writer = Writer(tokenizer, lambda turn: "<think>an <action>b</think> <action>c")
    episode = enforced_episode(env, writer, made, tokenizer)
    assert env.got and not [action for action in env.got if action.startswith("not possible")]
    assert all(turn.valid_action for turn in episode.turns)
    text = tokenizer.decode(episode.token_array()[episode.turns[0].start : episode.turns[0].stop])
    assert text.startswith("<think>an <action>b</think> <action>search[")


def joining_tokenizer() -> PreTrainedTokenizerBase:
    """A BPE of characters with two tokens that end a mark and begin an action: ">s" and ">q"."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {text: index for index, text in enumerate([*characters, ">s", ">q"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(">", "s"), (">", "q")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, eos_token=END, pad_token=END)


def test_a_token_that_ends_the_mark_and_begins_an_action_leaves_the_actions_that_begin_so() -> None:
    tokenizer, made = joining_tokenizer(), action_format("action_tag")
    env = Listing("search[plain dress]", "click[red]", "search[coat]")
    writer = Writer(tokenizer, lambda turn: "so <action>s")
    enforced_episode(env, writer, made, tokenizer)
    assert set(env.got) == {"search[plain dress]", "search[coat]"}
    chosen = [restriction.choices for restriction in writer.restrictions if restriction.choices]
    assert all(len(choices) == 2 for choices in chosen)

    env = Listing("search[plain dress]", "click[red]")
    episode = enforced_episode(env, Writer(tokenizer, lambda turn: "so <action>q"), made, tokenizer)
    assert set(env.got) == {"not possible: "} and not any(turn.valid_action for turn in episode.turns)
    assert episode.kept is None and {turn.finish_reason for turn in episode.turns} == {"length"}


@pytest.mark.parametrize("room", [1, 5, 11, 12, 13, 20, 31])
def test_a_turn_never_takes_more_tokens_than_it_may(room: int) -> None:
    tokenizer = byte_tokenizer(CHATML)
    writer = Writer(tokenizer, lambda turn: "so <action>x")
    made = action_format("action_tag")
    episode = enforced_episode(Listing("click[red]"), writer, made, tokenizer, max_turn_tokens=room)
    lengths = {turn.stop - turn.start for turn in episode.turns}
    assert lengths == {min(room, 31)}  # 11 of "so <action>", 10 of "click[red]", 9 of "</action>" and the end
    assert {turn.finish_reason for turn in episode.turns} == {"stop" if room == 31 else "length"}


def test_a_preempted_episode_continues_with_its_kept_sets() -> None:
    tokenizer, made = byte_tokenizer(CHATML), action_format("action_tag")

    def played(record: EpisodeRecord, env: ShopEnv) -> Trajectory:
        writer = Writer(tokenizer, lambda turn: "so <action>x")
        return asyncio.run(
            rollout(record, env=env, sampler=writer, tokenizer=tokenizer, action_format=made, allowance=LONG)
        )

    attempt = attempt_on(max_turn_tokens=200)
    whole = played(EpisodeRecord(attempt=attempt), Listing())
    record = EpisodeRecord(attempt=attempt)
    played(record, Listing())
    record.reopen_last_turn()
    resumed = resumed_record(attempt, record.partial())
    assert resumed.kept[0].count_array().tolist() == whole.kept.count_array().tolist()[: sum(resumed.loss_mask)]
    continued = played(resumed, Listing())
    assert (continued.tokens, continued.kept) == (whole.tokens, whole.kept)


# --- What is no action.

EVASIONS = {
    "white space in the mark": ("action_tag", "< action >fly</action>", 200),
    "a mark on two lines": ("action_tag", "<action\n>fly</action>", 200),
    "no space before the block": ("react", "Action:```fly```", 200),
    "another text that the pattern reads": ("pattern", "ACT :fly", 200),
    "cut off, in plain": ("plain", "", 7),
    "cut off before the closing mark": ("action_tag", "<action>x", 20),
}


@pytest.mark.parametrize(("name", "thought", "room"), EVASIONS.values(), ids=list(EVASIONS))
def test_what_is_no_admissible_action_is_none_however_it_is_written(name: str, thought: str, room: int) -> None:
    tokenizer, env = byte_tokenizer(CHATML), Listing("click[red]")
    writer = Writer(tokenizer, lambda turn: f"{thought}{END}")
    episode = enforced_episode(env, writer, action_format(name, YAML), tokenizer, max_turn_tokens=room)
    assert not any(turn.valid_action for turn in episode.turns)
    assert set(env.got) == {"not possible: "}, "the environment got a text that the policy chose"


# --- Faults.


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        (["click[<|end|>]"], "the admissible action .* is read as"),
        (["\ud800"], "the admissible action .* is read as"),
        (["click[zzz]"], r"the admissible action 'click\[zzz\]' is read as 'click \[ <\|unknown\|> \]'"),
        ([""], "the admissible action '' is read as ''; the tokenizer or `env.action_format` cannot write it"),
    ],
    ids=["mark in it", "no text", "unknown word", "empty"],
)
def test_an_action_that_cannot_be_written_fails_the_attempt_and_says_which(actions: list[str], complaint: str) -> None:
    writer = Writer(shop_tokenizer(), lambda turn: "")
    stop_reason, _ = failure_of(Listing(*actions), writer, complaint=complaint, allowance=ENFORCED)
    assert stop_reason is StopReason.ENV_ERROR


def test_more_actions_than_a_kept_set_can_hold_are_refused() -> None:
    tokenizer = byte_tokenizer(CHATML)
    many = [f"click[{number}]" for number in range(12_000)]
    with pytest.raises(EpisodeFailed, match=r"12000 admissible actions of .* tokens are too many"):
        enforced_episode(Listing(*many), Writer(tokenizer, lambda turn: ""), action_format("plain"), tokenizer)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["env.name=tools", "env.options.profile=small"], r"must be false for `env\.name` tools: it does not list"),
        (["sampling.max_turn_tokens=4"], r"`sampling\.max_turn_tokens` must be above \d+ with env\.enforce_admissible"),
        (["env.name=agent", "env.options.agent=a:b"], r"must be false for `env\.name` agent: it plays its episodes"),
    ],
)
def test_a_run_that_cannot_enforce_is_refused_before_an_engine_starts(overrides: list[str], complaint: str) -> None:
    config = load_config(None, ["env.enforce_admissible=true", *overrides])
    with pytest.raises(ConfigError, match=complaint):
        check_template(config, shop_tokenizer())
    check_template(load_config(None, ["env.enforce_admissible=true"]), shop_tokenizer())


def test_a_template_that_opens_a_thought_is_refused_where_the_action_stands_alone(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen2.5", tmp_path)
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    keys = ["env.enforce_admissible=true", "sampling.max_turn_tokens=200", "model.max_tokens=2000"]
    with pytest.raises(ConfigError, match="its prompt opens a thought, in which no action counts"):
        check_template(load_config(None, keys), tokenizer)
    check_template(load_config(None, [*keys, "env.action_format=action_tag"]), tokenizer)


@pytest.mark.parametrize("name", ["tools", "tests.actors.episode.test_formats:Bare"])
def test_a_format_without_marks_is_refused(name: str) -> None:
    config = load_config(None, ["env.enforce_admissible=true"])
    config.env.action_format = name
    with pytest.raises(ConfigError, match=r"`env\.enforce_admissible` must be false with env\.action_format tools or"):
        check_env(config.env)


# --- Exactness: a policy that samples among the choices, and the learner's log-probabilities of the same.


class Policy:
    """A tiny model as the engine: softmax over all tokens, or over those that continue a choice."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, temperature: float = 1.0) -> None:
        self._model, self._tokenizer, self._temperature = model, tokenizer, temperature
        self._ends = sorted(end_tokens(tokenizer))
        self.seeds = list[int]()  # of its generations

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, seed: int | None = None, restriction: Restriction | None = None
    ) -> Completion:
        assert seed is not None
        self.seeds.append(seed)
        choices, stops = (restriction.choices, restriction.stops) if restriction else ([], [])
        chance, written = torch.Generator().manual_seed(seed), list[int]()
        logprobs, sets = list[float](), list[list[int]]()
        while len(written) < sampling.max_turn_tokens and not (written and written[-1] in self._ends):
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens + written])).logits[0, -1].double() / self._temperature
            allowed = self._allowed(choices, written)
            if allowed:
                logits[[token for token in range(len(logits)) if token not in allowed]] = -torch.inf
            probabilities = logits.softmax(-1)
            written.append(int(torch.multinomial(probabilities, 1, generator=chance)))
            logprobs.append(float(probabilities[written[-1]].log()))
            sets.append(sorted(allowed))
            if any(stop in self._tokenizer.decode(written) for stop in stops):
                break
        kept = kept_sets(sets) if choices else None
        reason = "stop" if written[-1] in self._ends or stops else "length"
        return completion_of(written, logprobs, kept=kept, finish_reason=reason)

    def _allowed(self, choices: list[list[int]], written: list[int]) -> set[int]:
        following = set[int]()
        for choice in choices:
            if choice[: len(written)] == written:
                following.update(choice[len(written) : len(written) + 1] or self._ends)
        return following


def test_the_learners_log_probabilities_are_those_of_the_masked_policy(tmp_path: Path, ranks: Ranks) -> None:
    formats = {"mark": {"write": "find {action} under"}}
    texts = vocabulary_texts(EnvConfig(max_turns=8, action_format="mark", formats=formats, show_admissible=True), 60)
    shape = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    make_tiny_model(tmp_path, texts=texts, shape=shape, max_tokens=512, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = load_model(tmp_path, ranks=ranks, settings=FLOAT32)
    plain = without_absent(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)
    num_chosen = num_free = 0
    for name, seed in (("plain", 1), ("mark", 2), ("mark", 3)):
        episode = play(
            Listing(),
            Policy(plain, tokenizer, temperature=0.7),
            attempt=attempt_on(max_turn_tokens=48, seed=seed, temperature=0.7),
            tokenizer=tokenizer,
            action_format=action_format(name, formats),
            allowance=replace(ENFORCED, max_turns=4, max_tokens=512, rules=ChatRules()),
        )
        mask = episode.loss_mask_array()
        packed = pack(sequences_of(episode, advantage=1.0))
        found = model(packed)
        np.testing.assert_allclose(
            found.logprobs.detach().numpy(), episode.behaviour_logprob_array()[mask], atol=2e-5, rtol=0
        )
        assert episode.kept is not None
        num_chosen += np.count_nonzero(episode.kept.count_array())
        num_free += int(mask.sum()) - np.count_nonzero(episode.kept.count_array())
        # Where the policy had no choice, nothing is learned and nothing is uncertain.
        forced = torch.from_numpy(episode.kept.count_array() == 1)
        assert forced.any() and not found.logprobs[forced].any() and found.entropies[forced].abs().max() < 1e-6
        (gradient,) = torch.autograd.grad(found.logprobs[forced].sum(), [next(model.parameters())])
        assert not gradient.any()
    assert num_chosen > 20 and num_free > 20
