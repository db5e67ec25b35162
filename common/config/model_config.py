"""The model that a run trains."""

import math
from dataclasses import dataclass, field
from typing import Any

from slipstream.common.process.config_error import require
from slipstream.common.process.imported import is_own


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    hidden_size: int = 96  # width of the residual stream
    intermediate_size: int = 256  # width of the MLP
    num_layers: int = 3  # decoder layers
    num_heads: int = 3  # attention heads, each of head_dim
    num_kv_heads: int = 3  # key-value heads; divides num_heads
    head_dim: int = 32  # vLLM's CPU build takes 32, 64 or 128
    num_tasks: int = 400  # train tasks whose text defines the vocabulary

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "num_tasks"):
            value = getattr(self, name)
            require(value >= 1, f"model.tiny.{name}", ">= 1", value, "leave it out for the default")
        require(
            self.head_dim in (32, 64, 128),
            "model.tiny.head_dim",
            "32, 64 or 128",
            self.head_dim,
            "vLLM's CPU attention has no other",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.tiny.num_kv_heads",
            "a divisor of num_heads",
            self.num_kv_heads,
            f"num_heads is {self.num_heads}",
        )


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: int = 0  # of the adapters; then only adapters are trained; 0: off, every weight is trained
    alpha: int = 32  # an adapter is scaled by alpha / rank
    target_modules: list[str] = field(default_factory=list)  # suffixes of layer names; empty: all linear but the head

    def __post_init__(self) -> None:
        require(self.rank >= 0, "model.lora.rank", ">= 0", self.rank, "16 is usual, 0 trains every weight")
        require(self.alpha >= 1, "model.lora.alpha", ">= 1", self.alpha, "32 is usual")
        require(
            all(self.target_modules),
            "model.lora.target_modules",
            "names like q_proj",
            self.target_modules,
            "leave it empty for every linear layer but the head",
        )
        given = [name for name, default in (("alpha", 32), ("target_modules", [])) if getattr(self, name) != default]
        require(
            self.rank > 0 or not given,
            f"model.lora.{' and model.lora.'.join(given)}",
            "left out with model.lora.rank 0",
            [getattr(self, name) for name in given],
            "without adapters every weight is trained; 16 is a usual rank",
        )


def is_jinja_value(value: object) -> bool:
    """Whether the Python text of `value` is a Jinja expression of the same value."""
    match value:
        case dict():
            return all(isinstance(key, str) and is_jinja_value(each) for key, each in value.items())
        case list():
            return all(map(is_jinja_value, value))
        case float():
            return math.isfinite(value)
    return value is None or isinstance(value, str | int)


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # a Hugging Face folder, or an id of its Hub; empty: make the tiny model of model.tiny
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dtype: str = "auto"  # of the forward pass: float32, bfloat16, auto (on a CPU the former); master weights: float32
    max_tokens: int = 512  # context length: a prompt with its reply is never longer
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template, like enable_thinking
    history: str = "template"  # earlier replies as the chat template shows them, or as they were sampled: sampled
    context: str = "stop"  # where an episode fills it: stop, window, summary, or `module:function`
    tool_parser: str = ""  # vLLM's parser of tool calls by its name, like hermes; empty: calls stay text
    reasoning_parser: str = ""  # vLLM's parser of thoughts by its name, like qwen3; empty: thoughts stay text
    roles: str = "as_sent"  # alternate: for templates that refuse system messages, tool results or two users in a row

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            "model.dtype",
            "auto, float32 or bfloat16",
            self.dtype,
            "auto chooses by the device",
        )
        require(self.max_tokens >= 16, "model.max_tokens", ">= 16", self.max_tokens, "a whole episode must fit")
        for name, value in self.template_arguments.items():
            require(
                name.isidentifier() and is_jinja_value(value),
                f"model.template_arguments.{name}",
                "a name, and a value of text, finite numbers, true, false, null, lists and mappings",
                value,
                "see the variables of the chat template",
            )
        require(
            self.history in ("template", "sampled"),
            "model.history",
            "template or sampled",
            self.history,
            "see docs/models.md",
        )
        require(
            self.context in ("stop", "window", "summary") or is_own(self.context),
            "model.context",
            "stop, window, summary, or module:function for your own",
            self.context,
            "see docs/models.md",
        )
        require(
            self.context == "stop" or self.history == "template",
            "model.history",
            f"template with model.context={self.context}",
            self.history,
            "a conversation that was shortened is rendered by the template",
        )
        require(
            self.roles in ("as_sent", "alternate"),
            "model.roles",
            "as_sent or alternate",
            self.roles,
            "see docs/models.md",
        )
