"""The tiny model: a Hugging Face folder like any other, the same from the same seed, that speaks the shop's words."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.trajectory import Task
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.tools.run.prepare import load_tokenizer
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.common.text.small_tokenizer import shop_tokenizer

SMALL = TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)
TEXTS = ["find plain dress under 25", "click[plain dress 10]", "a [SEP] b"]


def test_the_folder_loads_as_any_other_with_the_shape_asked_for_and_one_token_for_each_word(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, texts=TEXTS, shape=SMALL, max_tokens=64, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    config = model.config
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 2)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (1, 32, 64)
    assert config.vocab_size == 32  # 7 of its own and 12 words, in whole lanes of 16
    assert len(tokenizer) == 19
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    words = ["click", "[", "plain", "dress", "10", "]", "[SEP]", "plain"]
    assert tokenizer.tokenize("click[plain dress 10] [SEP] plain") == words
    assert tokenizer.tokenize("trousers") == ["<|unknown|>"]


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed, texts in (("a", 3, TEXTS), ("b", 3, TEXTS[::-1]), ("c", 4, TEXTS)):
        make_tiny_model(tmp_path / name, texts=texts, shape=SMALL, max_tokens=64, seed=seed)
    first, again, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in "ab"]
    assert tokenizers[0] == tokenizers[1]


def test_every_word_of_tasks_never_seen_is_in_the_vocabulary() -> None:
    tokenizer, env = shop_tokenizer(), ShopEnv()
    for index in range(50):
        observation = asyncio.run(env.reset(Task(env="shop", split="held_out", index=index)))
        said = [observation.messages[0].content]
        while not observation.done:
            said.append(env.expert())
            observation = asyncio.run(env.step(said[-1]))
            said.append(observation.messages[0].content)
        assert tokenizer.unk_token_id not in tokenizer.encode(" ".join([*said, "invalid"]))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, texts=TEXTS, shape=SMALL, max_tokens=64, seed=0)
    load_tokenizer(tmp_path, ModelConfig())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="its tokenizer has no chat template"):
        load_tokenizer(tmp_path, ModelConfig())
