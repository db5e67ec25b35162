"""Every parser of thoughts that vLLM has: its marks are known here too, or its templates are refused at the start."""

import asyncio
import copy
import re

import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.pieces import check_pieces
from slipstream.common.text.thought import thought_marks, without_thought
from tests.actors.tool_parsing import parsing
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer

THINK, GRANITE = ("<think>", "</think>"), ("Here is my thought process:", "Here is my response:")
# What each parser reads as the marks of a thought; a text: the refusal of a template that has them.
PARSERS: dict[str, tuple[str, str] | str] = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45", "glm45", "glm47"), THINK),
    **dict.fromkeys(("granite_thinking_parser", "holo2", "hunyuan_a13b", "hy_v3", "kimi_k2", "ling3", "mimo"), THINK),
    **dict.fromkeys(("minicpmv", "minimax_m2", "minimax_m2_append_think", "nemotron_v3", "olmo3"), THINK),
    **dict.fromkeys(("poolside_v1", "qwen3", "step3", "step3p5"), THINK),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": GRANITE,
    "hf": ("<thoughts>", "</thoughts>"),  # those of the model's own `response_template`
    "hy_v4": ("<think:6124>", "</think:6124>"),
    "inkling": "has '<|content_thinking|>', which looks like the mark of a thought",
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse_glimmer": "writes channels (assistant to=self, as Muse Glimmer)",
    "openai_gptoss": "writes channels (<|channel|>, as gpt-oss)",
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
REFUSED = {
    "inkling": "<|message_model|><|content_thinking|>hm<|end_message|><|content_text|>",
    "muse_glimmer": "<|start|>assistant to=self<|message|>hm<|eom|>",
    "openai_gptoss": "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>",
}
# Each needs other tokens, a package, its own vocabulary's ids, or an argument of the template to read thoughts at all.
NOT_READ = {"cohere_command3", "cohere_command4", "deepseek_v3", "hf", "hunyuan_a13b", "hy_v3", "mistral", "olmo3"}
NOT_READ |= {"poolside_v1"}
OTHERS = ["<0x0A>", "<response>", "</response>", "<assistant>", "<ifm|tool_calls>", "<|channel>", "<|end_message|>"]


def tokenizer_of(name: str, shown: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(byte_tokenizer(CHATML))
    marks = PARSERS[name]
    are_tokens = isinstance(marks, tuple) and name != "granite"
    single = [mark.removesuffix("thought\n") for mark in marks] if are_tokens else []
    tokenizer.add_special_tokens({"extra_special_tokens": [*single, *OTHERS]})
    tokenizer.chat_template = CHATML + "{% if false %}" + shown + "{% endif %}"
    return tokenizer


def test_the_table_has_every_parser() -> None:
    parsing()  # vLLM reads the environment when it is imported
    from vllm.reasoning import ReasoningParserManager

    assert set(ReasoningParserManager.list_registered()) == set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_a_thought_of_each_parser_is_known_or_refused(name: str) -> None:
    marks = PARSERS[name]
    if isinstance(marks, str):
        with pytest.raises(ConfigError, match=re.escape(marks)):
            check_pieces(tokenizer_of(name, REFUSED[name]))
        return
    tokenizer = tokenizer_of(name, " ".join(marks))
    reply = f"{marks[0]}hm{marks[1]}5"
    assert without_thought(reply, prompt="ask", marks=thought_marks(tokenizer)) == "5"
    if name not in NOT_READ:
        parse = parsing("", name, tokenizer)
        tokens = tokenizer.encode(reply, add_special_tokens=False)
        answer = asyncio.run(parse(reply, tokens=tokens, prompt=[], tools=[]))
        assert answer.content.endswith("5") and (name.endswith("append_think") or "hm" not in answer.content)
