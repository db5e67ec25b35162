"""The model that a run trains."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from slipstream.common.config.setting_bounds import Count, Whole, check_bounds
from slipstream.common.process.config_error import require
from slipstream.common.process.imported import is_own


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    rank: Whole = 0  # of the adapters; then only adapters are trained; 0: off, every weight is trained
    alpha: Count = 32  # an adapter is scaled by alpha / rank

    def __post_init__(self) -> None:
        check_bounds(self, "model.lora.")
        require(
            self.rank > 0 or self.alpha == 32,
            "model.lora.alpha",
            "left out with model.lora.rank 0",
            self.alpha,
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
    path: str = ""  # a Hugging Face folder, or an id of its Hub; empty: make a tiny model
    tiny_depth: Count = 3  # of the tiny model: its decoder layers, and its attention heads, of 32 each
    lora: LoraConfig = field(default_factory=LoraConfig)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the forward pass; auto: float32 on a CPU
    max_tokens: Annotated[int, Ge(16)] = 512  # context length: a prompt with its reply is never longer
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template, like enable_thinking
    history: Literal["template", "sampled"] = "template"  # earlier replies by the chat template, or as sampled
    context: str = "stop"  # where an episode fills it: stop, window, summary, or `module:function`
    tool_parser: str = ""  # vLLM's parser of tool calls by its name, like hermes; empty: calls stay text
    reasoning_parser: str = ""  # vLLM's parser of thoughts by its name, like qwen3; empty: thoughts stay text
    roles: Literal["as_sent", "alternate"] = "as_sent"  # alternate: the template refuses other orders

    def __post_init__(self) -> None:
        check_bounds(self, "model.")
        for name, value in self.template_arguments.items():
            require(
                name.isidentifier() and is_jinja_value(value),
                f"model.template_arguments.{name}",
                "a name, and a value of text, finite numbers, true, false, null, lists and mappings",
                value,
                "see the variables of the chat template",
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
