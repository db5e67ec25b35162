"""Eight families of chat templates: no sampled token is encoded again, and every branch has a reason."""

import asyncio
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.episode.thought_limit import ThoughtLimit
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.rows.message_fields import read_message
from slipstream.common.text.chat import Chat, reply_form
from slipstream.common.text.chat_template import rendered
from slipstream.common.text.codec import decoder
from slipstream.common.text.dialogue import Branch, Tokeniser
from slipstream.common.text.pieces import check_pieces
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root, with_arguments
from tests.actors.episode.episodes import ALLOWANCE, apart, attempt_on, engine_of, ids, saying
from tests.common.text.chat_templates import FAMILIES, family_tokenizer
from tests.common.text.small_tokenizer import CHATML

MIDNIGHT_S = 1_784_937_600.0  # 2026-07-25, 00:00 UTC
TURNS = 20
SYSTEM, ASK = Message("system", "call a tool"), Message("user", " find ab a ")
QUESTION = (Message("user", " and ab? \n"),)
RESULTS = (Message("tool", "ab: 1"), Message("tool", "a: 2"))
PLAIN, THOUGHT = "try ab a", "<think>\nab or a?\n</think>\n\ntry ab a"

# By family: the branches of 20 turns, where questions or results of tools follow replies without and with thoughts.
# Only thoughts cause any: a family drops those before the last question, or, as DeepSeek's, all of them. A thought that
# Qwen3's template shows after a result is no branch. Without a thought, GLM's template adds an empty one.
BRANCHES = {
    **{family: {"question": (0, 0)} for family in ("mistral", "gemma")},
    **{family: {"question": (0, 0), "results": (0, 0)} for family in ("qwen2.5", "llama3", "phi")},
    "qwen3": {"question": (0, TURNS), "results": (0, 0)},
    "glm": {"question": (TURNS, TURNS), "results": (TURNS, 0)},
    "deepseek": {"question": (TURNS, TURNS), "results": (TURNS, TURNS)},
}
CASES = [(family, follows, thinks) for family in BRANCHES for follows in BRANCHES[family] for thinks in (False, True)]
every_family = pytest.mark.parametrize("family", FAMILIES)


def with_template(template: str, folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = family_tokenizer("qwen2.5", folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("cleans_up", [False, True])
@every_family
def test_a_reply_reads_as_the_tokenizer_itself_decodes_it(family: str, cleans_up: bool, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(family, tmp_path)
    tokenizer.clean_up_tokenization_spaces = cleans_up
    assert apart(tokenizer, PLAIN) != ids(tokenizer, PLAIN)
    for tokens in ([], *([*apart(tokenizer, text), *range(6)] for text in (PLAIN, THOUGHT))):
        assert decoder(tokenizer)(tokens) == tokenizer.decode(tokens)


def opening_of(family: str) -> tuple[Message, ...]:
    return (SYSTEM, ASK) if FAMILIES[family].has_system else (ASK,)


def branches_of(
    tokenizer: PreTrainedTokenizerBase,
    opening: tuple[Message, ...],
    reply: str,
    follows: tuple[Message, ...],
    *,
    num_turns: int = TURNS,
    model: ModelConfig | None = None,
) -> int:
    """Play some turns; return the number of branches. Every token of the sequence is checked after each turn."""
    chat, end = Chat(tokenizer, model=model), reply_form(tokenizer).ends["tool" if follows is RESULTS else "user"]
    sequence, num_branches = chat.open(opening), 0
    for _ in range(num_turns):
        sampled = apart(tokenizer, f"{reply} \n") + ids(tokenizer, end)
        chat.reply(sampled)
        sequence += sampled
        extension = chat.extend(follows)
        added = tokenizer.decode(extension.tokens)
        num_branches += extension.new_branch
        if extension.new_branch:
            sequence = []  # a prompt that is not trained
            assert reply.split("</think>")[-1].strip() in added
        else:
            assert added.count("try") == 0  # only what is new is rendered
        sequence += extension.tokens
        messages = [{"role": message.role, "content": message.content} for message in chat._messages]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if model is None:  # white space apart, the policy reads what the template renders
            assert "".join(tokenizer.decode(sequence).split()) == "".join(shown.split())
    return num_branches


def played(
    tokenizer: PreTrainedTokenizerBase, family: str, *, follows: str, thinks: bool, model: ModelConfig | None = None
) -> int:
    reply = THOUGHT.removeprefix("<think>\n") if thinks and family == "deepseek" else THOUGHT if thinks else PLAIN
    answers = QUESTION if follows == "question" else RESULTS
    return branches_of(tokenizer, opening_of(family), reply, answers, model=model)


@pytest.mark.parametrize(("family", "follows", "thinks"), CASES)
def test_20_turns_read_as_their_template_renders_them_and_branch_where_it_rewrites_them_but_never_as_sampled(
    tmp_path: Path, family: str, follows: str, thinks: bool
) -> None:
    tokenizer, model = family_tokenizer(family, tmp_path), ModelConfig(history="sampled")
    assert played(tokenizer, family, follows=follows, thinks=thinks) == BRANCHES[family][follows][thinks]
    assert played(tokenizer, family, follows=follows, thinks=thinks, model=model) == 0


def test_an_argument_of_the_template_keeps_thoughts_and_is_part_of_the_hash(tmp_path: Path) -> None:
    plain = family_tokenizer("qwen3", tmp_path)
    keeping = load_tokenizer(tmp_path, {"preserve_thinking": True})
    assert played(keeping, "qwen3", follows="question", thinks=True) == 0
    assert tokenizer_root(keeping) != tokenizer_root(plain)
    switched_off = load_tokenizer(tmp_path, {"enable_thinking": False})
    prompt = switched_off.decode(Chat(switched_off).open((ASK,)))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ strftime_now('%d %b %Y') }}{{ strftime_now( \"%Y\" ) }}{{ strftime_now('%Y') }}", "24 Jul 202620262026"),
        ("{% if strftime_now is defined %}{{ strftime_now('%H:%M:%S') }}{% endif %}", "23:59:59"),
        ("{{ 'no date' }}", "no date"),
    ],
)
def test_every_date_that_a_template_writes_is_that_of_the_start(tmp_path: Path, template: str, written: str) -> None:
    tokenizer = with_template(template, tmp_path)
    today = datetime.fromtimestamp(MIDNIGHT_S - 1, UTC)
    assert rendered(tokenizer, [{"role": "user", "content": "a"}], today=today) == written


@pytest.mark.parametrize("template", ["{{ strftime_now(form) }}", "{% set now = strftime_now %}{{ now('%Y') }}"])
def test_a_template_whose_dates_cannot_be_kept_is_refused(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(template, tmp_path)
    with pytest.raises(ValueError, match="must call strftime_now with a literal format"):
        rendered(tokenizer, [{"role": "user", "content": "a"}], today=datetime.fromtimestamp(MIDNIGHT_S, UTC))


@pytest.mark.parametrize("template", ["\n\n{{ text }}|", "  {% if true %}\n{{ text }}{% endif %}", "{{ text }}"])
@pytest.mark.parametrize("value", [True, None, -1.5, '\'{% "quoted" %}\\n\n}}ü\U0001f600', ["a", {"b": [1]}]], ids=repr)
def test_an_argument_has_its_value_in_the_template_alone(tmp_path: Path, template: str, value: object) -> None:
    tokenizer = family_tokenizer("phi", tmp_path)

    def shown(chat_template: str, **arguments: object) -> str:
        given = {"chat_template": chat_template, "text": "kept"} | arguments
        return str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, **given))

    template = template.replace("text", "text ~ (argument | tojson)")
    assert shown(str(with_arguments(template, {"argument": value}))) == shown(template, argument=value)


def test_a_thinking_reply_is_acted_on_without_its_thought(tmp_path: Path) -> None:
    for family, written in (("qwen3", "<think>\nred\n</think>\n\nblue"), ("deepseek", "red</think>blue")):
        tokenizer = family_tokenizer(family, tmp_path / family)
        chat = Chat(tokenizer)
        chat.open((ASK,))
        chat.reply(ids(tokenizer, written))
        assert chat.answer.strip() == "blue"
        chat.extend(QUESTION)
        chat.reply(ids(tokenizer, written.split("</think>")[0]))  # cut off while it thinks
        assert chat.answer == ""


def test_the_date_of_an_episode_is_that_of_its_start(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("llama3", tmp_path)
    for started_at_s, date in ((MIDNIGHT_S - 1, "24 Jul 2026"), (MIDNIGHT_S, "25 Jul 2026")):
        assert f"Today Date: {date}" in tokenizer.decode(Chat(tokenizer, started_at_s=started_at_s).open((ASK,)))
    fixed = load_tokenizer(tmp_path, {"date_string": "some day"})
    assert "Today Date: some day" in fixed.decode(Chat(fixed).open((ASK,)))


def test_alternate_roles_are_accepted_by_a_template_that_refuses_others(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("gemma", tmp_path)
    model = ModelConfig(roles="alternate")
    chat = Chat(tokenizer, model=model)
    prompt = tokenizer.decode(chat.open((SYSTEM, ASK)))
    assert prompt == "<bos><start_of_turn>user\ncall a tool\n\n find ab a<end_of_turn>\n<start_of_turn>model\n"
    chat.reply(ids(tokenizer, "look<end_of_turn>"))
    added = tokenizer.decode(chat.extend((*RESULTS, *QUESTION)).tokens)
    assert added == "\n<start_of_turn>user\nab: 1\n\na: 2\n\n and ab?<end_of_turn>\n<start_of_turn>model\n"
    (branch,) = Tokeniser(tokenizer, model=model).branches([SYSTEM, ASK, Message("assistant", "look")])
    assert tokenizer.decode(branch.tokens) == f"{prompt}look<end_of_turn>"
    with pytest.raises(ValueError, match="the chat template refuses the conversation: System role not supported"):
        Tokeniser(tokenizer).branches([SYSTEM, ASK, Message("assistant", "look")])


def conversation(family: str, *replies: str) -> list[Message]:
    messages = list(opening_of(family))
    for reply in replies:
        messages += [Message("assistant", reply), *(RESULTS if FAMILIES[family].has_tools else QUESTION)]
    return [*messages, Message("assistant", "done")]


def learnt_texts(tokenizer: PreTrainedTokenizerBase, branches: Sequence[Branch]) -> list[str]:
    """The text of each stretch of learned tokens."""
    texts: list[str] = []
    for branch in branches:
        pairs = zip(branch.loss_mask, branch.tokens, strict=True)
        for is_learned, stretch in itertools.groupby(pairs, key=operator.itemgetter(0)):
            if is_learned:
                texts.append(tokenizer.decode([token for _, token in stretch]))
    return texts


@every_family
@pytest.mark.parametrize("history", ["template", "sampled"])
def test_every_reply_is_learned_once_as_rendered_when_it_is_last(tmp_path: Path, family: str, history: str) -> None:
    """The other derivation: the whole rendering up to each reply, less the rendering up to its prompt."""
    tokenizer = family_tokenizer(family, tmp_path)
    messages = conversation(family, "one", "two")
    branches = Tokeniser(tokenizer, model=ModelConfig(history=history)).branches(messages)
    learnt = learnt_texts(tokenizer, branches)
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    assert len(learnt) == len(places)
    for text, place in zip(learnt, places, strict=True):
        prompt = tokenizer.apply_chat_template(dicts[:place], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(dicts[: place + 1], tokenize=False)
        if family == "deepseek":  # its generation prompt opens a thought, which its rendering of a reply drops
            assert text == f"</think>\n\n{messages[place].content}<|end_of_sentence|>"
        elif family == "glm":  # the next message ends the turn
            ends = "<|user|>" if place == places[-1] else "<|observation|>"
            assert text == whole.removeprefix(prompt) + ends
        else:
            assert whole.startswith(prompt + text)
            assert whole.removeprefix(prompt + text).strip() in ("", "<|endoftext|>")
    assert len(branches) == (3 if history == "template" and family in ("qwen3", "deepseek") else 1)


@pytest.mark.parametrize(
    ("family", "thought", "learnt"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nb", "<think>\nhm\n</think>\n\nb<|im_end|>"),
        ("glm", "<think>hm</think>\nb", "\n<think>hm</think>\nb<|observation|>"),
        ("deepseek", "<think>\nhm\n</think>\n\nb", "hm\n</think>\n\nb<|end_of_sentence|>"),
    ],
)
def test_a_recorded_thought_is_learned_in_its_reply(tmp_path: Path, family: str, thought: str, learnt: str) -> None:
    tokenizer = family_tokenizer(family, tmp_path)
    texts = learnt_texts(tokenizer, Tokeniser(tokenizer).branches(conversation(family, thought, thought)))
    assert texts[:2] == [learnt, learnt] and len(texts) == 3


SHOWN = "{% if message.reasoning_content %}<seed:think>\n{{ message.reasoning_content }}\n</seed:think>\n{% endif %}"


@pytest.mark.parametrize(
    ("family", "shown", "learnt"),
    [
        ("seed-oss", "", "<seed:think>hm</seed:think>b<seed:eos>"),
        ("seed-oss", SHOWN, "<seed:think>\nhm\n</seed:think>\nb<seed:eos>"),
        ("apertus", "", "<|inner_prefix|>hm<|inner_suffix|>b<|assistant_end|>"),
        ("kimi", "", "◁think▷hm◁/think▷b<|im_end|>"),
        ("gemma4", "", "<|channel>thought\nhm\n<channel|>\nb<turn|>"),
        ("llama3", "", "<think>\nhm\n</think>\n\nb<|eot_id|>"),  # it has no marks: these are known everywhere
    ],
)
def test_a_thought_in_a_field_is_learned_within_its_marks(tmp_path: Path, family: str, shown: str, learnt: str) -> None:
    row = read_message({"role": "assistant", "content": "b", "reasoning_content": "hm"}, "messages").message
    tokenizer = family_tokenizer(family, tmp_path, {"enable_thinking": True})
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message.content }}", shown + "{{ message.content }}")
    (branch,) = Tokeniser(tokenizer).branches([ASK, row])
    assert learnt_texts(tokenizer, [branch]) == [learnt]
    chat = Chat(tokenizer)
    chat.open((ASK,))
    chat.reply(chat.written(learnt))
    assert chat.answer.strip() == "b"


def test_a_recorded_thought_is_refused_where_thinking_is_off(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen3", tmp_path, {"enable_thinking": False})
    tokeniser = Tokeniser(tokenizer)
    with pytest.raises(ValueError, match="a message has a thought, but the template arguments turn thinking off"):
        tokeniser.branches(conversation("qwen3", THOUGHT))
    texts = learnt_texts(tokenizer, tokeniser.branches(conversation("qwen3", "b")))
    assert texts == ["b<|im_end|>", "done<|im_end|>"]


def test_a_template_that_refuses_the_conversation_is_named_with_its_cure_before_an_engine_runs(tmp_path: Path) -> None:
    refusing = family_tokenizer("gemma", tmp_path)
    check_template(load_config(None, []), refusing)  # the small shop has no system message
    tags = ["env.action_format=action_tag"]
    with pytest.raises(ConfigError) as refusal:
        check_template(load_config(None, tags), refusing)
    assert f"the chat template in {tmp_path} refuses the conversation of `env.name` shop" in str(refusal.value)
    assert "system, user, assistant, user: System role not supported; set model.roles=alternate" in str(refusal.value)
    check_template(load_config(None, [*tags, "model.roles=alternate"]), refusing)
    judge = "env.rewards.clear={part: judge, url: actors, rubric: {text: x, scale: [0, 1], criteria: {a: b}}}"
    with pytest.raises(ConfigError, match=r"refuses the prompt of the judge `env\.rewards\.clear`.*set model\.roles="):
        check_template(load_config(None, [judge]), refusing)
    check_template(load_config(None, [judge, "model.roles=alternate"]), refusing)


def test_a_template_that_divides_by_zero_is_refused_as_one_that_names_its_reason(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("qwen2.5", tmp_path)
    tokenizer.chat_template += "{% if messages[0].role == 'system' %}{{ 1 // 0 }}{% endif %}"
    with pytest.raises(ConfigError, match=r"refuses the conversation of `env\.name` shop.*zero; set model\.roles="):
        check_template(load_config(None, ["env.action_format=action_tag"]), tokenizer)
    with pytest.raises(ValueError, match=r"the chat template refuses the conversation: .*zero"):
        Tokeniser(tokenizer).branches([SYSTEM, ASK, Message("assistant", "look")])


GRANITE = f"Write 'Here is my thought process:' and 'Here is my response:'{CHATML}"
THOUGHTS = {
    "deepseek": ("<think>", "</think>", CHATML),
    "magistral": ("[THINK]", "[/THINK]", CHATML),
    "seed": ("<seed:think>", "</seed:think>", CHATML),
    "gemma 4": ("<|channel>thought\n", "<channel|>", CHATML + "{{ '<|think|><channel|>' if enable_thinking }}"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", CHATML),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>", CHATML),
    "kimi": ("◁think▷", "◁/think▷", CHATML),
    "granite": ("Here is my thought process:", "Here is my response:", GRANITE),
    **{
        f"a pair of the template, {word}": (f"<{word}>", f"</{word}>", CHATML + f"{{# <{word}> and </{word}> #}}")
        for word in ("reason", "thinking", "analysis", "reflection", "scratchpad", "inner_monologue", "|Thought|")
    },
    "a pair in brackets": ("[REASONING]", "[/REASONING]", CHATML + "{# [REASONING] and [/REASONING] #}"),
    "a pair of the tokenizer": ("<think:6124>", "</think:6124>", CHATML),
    "a quantized granite": ("Here's my thought process:", "Here's my response:", GRANITE),
    "begin and end": (
        "<|begin_of_thought|>",
        "<|end_of_thought|>",
        CHATML + "{# <|begin_of_thought|> <|end_of_thought|> #}",
    ),
}


@pytest.mark.parametrize("family", THOUGHTS)
def test_a_thought_of_any_family_is_no_action_and_is_closed(family: str, tmp_path: Path) -> None:
    opening, closing, template = THOUGHTS[family]
    tokenizer = with_template(template, tmp_path)
    if family == "a pair of the tokenizer":
        tokenizer.add_special_tokens({"extra_special_tokens": [opening, closing]})
    chat = Chat(tokenizer)
    prompt = chat.open((ASK,))
    chat.reply(ids(tokenizer, f"{opening}click[a]{closing}click[b]<|im_end|>"))
    assert chat.answer.strip() == "click[b]"
    engine = engine_of(saying(tokenizer, f"{opening} one two three four", "click[b]<|im_end|>"), max_tokens=1000)
    allowance = replace(ALLOWANCE, max_thought_tokens=len(ids(tokenizer, opening)) + 3, max_tokens=1000)
    limited = ThoughtLimit(engine, tokenizer, allowance)
    completion = asyncio.run(limited.generate(prompt, attempt_on(max_turn_tokens=200).sampling))
    assert tokenizer.decode(completion.tokens) == f"{opening} on{closing}click[b]<|im_end|>"


@pytest.mark.parametrize("mark", ["<|thinking|>", "<reflection>", "[REASONING]"])
def test_a_template_whose_thoughts_cannot_be_told_is_refused(mark: str, tmp_path: Path) -> None:
    tokenizer = with_template(f"{{# {mark} #}}{CHATML}", tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"has '{mark}', which looks like the mark of a thought")):
        check_pieces(tokenizer)
