"""The chat templates of 40 models as their makers wrote them: each is played exactly, or refused with a sentence.

They are read from the package trl, which has copies for its own tests. A byte-level tokenizer gets the marks of each.
"""

# ruff: noqa: RUF001  DeepSeek's special tokens have such characters

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.text.chat import Chat
from slipstream.common.text.dialogue import Tokeniser
from slipstream.common.text.tokenizer import load_tokenizer
from tests.common.text.chat_templates import save_byte_tokenizer
from tests.common.text.test_chat_families import ASK, PLAIN, QUESTION, RESULTS, THOUGHT, branches_of, learnt_texts

found = importlib.util.find_spec("trl")
FOLDER = Path(*((found and found.submodule_search_locations) or [])) / "chat_templates"
MARK = re.compile(
    r"<\|[^<>|\s\"]{1,40}\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|<end_of_utterance>|<sop>|\[gMASK\]|<\|[a-z]+>|<[a-z]+\|>"
)
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    **dict.fromkeys(("gemma4", "diffusion_gemma"), "<turn|>"),
    "gemma": "<end_of_turn>",
    "glm": "<|user|>",
    "gptoss": "<|return|>",
    **dict.fromkeys(("idefics3", "smolvlm"), "<end_of_utterance>"),
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
}
# Where the template rewrites earlier replies, so that a new branch begins: after a question to a reply without a
# thought, after results of tools, after a question to a reply with a thought. None: it takes no such messages.
REWRITES: dict[str, tuple[bool, bool | None, bool]] = {
    **dict.fromkeys(("cohere", "gemma", "gemma3"), (False, None, False)),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3", "glm4moe"), (True, True, True)),
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), (False, True, False)),
    "gemma4_v2": (False, False, False),
    **dict.fromkeys(("lfm2", "lfm2_v2"), (False, False, False)),
    **dict.fromkeys(("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), (False, False, True)),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2", "phi3", "phi3_5"), (False, False, False)),
    **dict.fromkeys((f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")), (True, True, True)),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_vl"), (False, False, False)),
    "qwen3": (False, False, True),
    "qwen3_5_nothink": (True, False, True),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), (True, True, True)),
}
REFUSED = {
    "cohere2": "cannot be used turn by turn",
    **dict.fromkeys(("gptoss", "muse_glimmer"), "the chat template writes channels"),
    **dict.fromkeys(
        ("idefics3", "smolvlm"), "does not render an assistant's message right after its generation prompt"
    ),
    "llava_next": "the chat template in .* refuses the conversation",
}


def official(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer with the template `name` and its marks, as a run loads it."""
    template = (FOLDER / f"{name}.jinja").read_text()
    end = next((end for family, end in ENDS.items() if name.startswith(family)), "<|im_end|>")
    ends = [end, "<|observation|>"] if name.startswith("glm") else [end]
    save_byte_tokenizer(folder, template, ["<bos>", end, *MARK.findall(template)], ends=ends, bos="<bos>")
    return load_tokenizer(folder)


def test_every_template_of_the_package_is_played_or_refused() -> None:
    names = {path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")}
    assert names == REWRITES.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_played_is_refused_before_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=REFUSED[name]):
        check_template(load_config(None, [f"model.path={tmp_path}"]), official(name, tmp_path))


def branches(tokenizer: PreTrainedTokenizerBase, follows: tuple[Message, ...], reply: str) -> bool:
    return branches_of(tokenizer, (ASK,), reply, follows, num_turns=3) > 0


@pytest.mark.parametrize("name", REWRITES)
def test_a_conversation_reads_as_its_template_renders_it_and_is_learned_so(name: str, tmp_path: Path) -> None:
    tokenizer, (question, results, thought) = official(name, tmp_path), REWRITES[name]
    assert branches(tokenizer, QUESTION, PLAIN) == question
    assert branches(tokenizer, QUESTION, THOUGHT) == thought
    if results is None:
        with pytest.raises(Exception, match=r"alternate|not supported"):
            branches(tokenizer, RESULTS, PLAIN)
    else:
        assert branches(tokenizer, RESULTS, PLAIN) == results
    # Each recorded reply is learned once, and no text of the world becomes a mark.
    end = str(tokenizer.eos_token)
    for asked in (ASK, Message("user", f"find {end} ab")):
        messages = [asked, Message("assistant", "one"), *QUESTION, Message("assistant", "two")]
        text = "".join(learnt_texts(tokenizer, Tokeniser(tokenizer).branches(messages)))
        assert text.count("one") == text.count("two") == 1 and text.count(end) == 2
    prompts = [Chat(tokenizer).open((message,)) for message in (ASK, asked)]
    assert prompts[0].count(tokenizer.eos_token_id) == prompts[1].count(tokenizer.eos_token_id)
