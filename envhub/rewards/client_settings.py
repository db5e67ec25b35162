"""Makes a chat client from the settings of a file, with checked values."""

import math
import urllib.parse
from collections.abc import Mapping
from typing import Any

from slipstream.common.process.config_error import ConfigError, require
from slipstream.envhub.rewards.chat_client import ACTORS, ChatClient, Secret


def client_of(
    key: str,
    *,
    url: str,
    key_env: str = "",
    key_file: str = "",
    max_concurrent: int = 16,
    timeout_s: float = 60.0,
    deadline_s: float = 300.0,
    max_requests: int = 0,
    max_total_tokens: int = 0,
    max_cost: float = 0.0,
    input_price: float = 0.0,
    output_price: float = 0.0,
) -> ChatClient:
    """Make a client of the server at `url`, or of the run's own policy. Raises ConfigError, with `key`."""
    if url != ACTORS:
        _check_url(key, url)
    both = isinstance(key_env, str) and isinstance(key_file, str) and not (key_env and key_file)
    require(both, f"{key}.key_env, {key}.key_file", "at most one name", "two", "remove one")
    check_whole(
        key,
        {
            "max_concurrent": (max_concurrent, 1),
            "max_requests": (max_requests, 0),
            "max_total_tokens": (max_total_tokens, 0),
        },
    )
    for name, amount in {"max_cost": max_cost, "input_price": input_price, "output_price": output_price}.items():
        require(is_number(amount) and amount >= 0, f"{key}.{name}", ">= 0", amount, "leave it out for no limit")
    for name, value in {"timeout_s": timeout_s, "deadline_s": deadline_s}.items():
        require(is_number(value) and value > 0, f"{key}.{name}", "> 0", value, "leave it out for the default")
    priced = not max_cost or input_price + output_price > 0
    require(priced, f"{key}.max_cost", "0 without input_price and output_price", max_cost, "give the prices")
    return ChatClient(
        url=url,
        secret=Secret(variable=key_env, file=key_file),
        timeout_s=timeout_s,
        deadline_s=deadline_s,
        max_concurrent=max_concurrent,
        max_requests=max_requests,
        max_tokens=max_total_tokens,
        max_cost=max_cost,
        input_price=input_price,
        output_price=output_price,
    )


def check_request(key: str, request: Any, example: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `request` has more fields of a request than those that we write."""
    own = isinstance(request, Mapping) and not request.keys() & {"model", "messages", "stream", "n"}
    require(
        own, f"{key}.request", "fields of a request, without model and messages", request, f"{example} is the default"
    )


def check_model(key: str, model: Any) -> None:
    """Raise ConfigError unless `model` is a name."""
    require(isinstance(model, str) and model != "", f"{key}.model", "a name", model, "the server's name of a model")


def check_whole(key: str, whole: Mapping[str, tuple[Any, int]]) -> None:
    """Raise ConfigError unless each value is a whole number, and not below the least allowed beside it."""
    for name, (value, least) in whole.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(is_whole, f"{key}.{name}", f"a whole number >= {least}", value, "leave it out for the default")


def is_number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_url(key: str, url: object) -> None:
    parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"`{key}.url` must be like http://host:8000/v1, got {url!r}; give the server's address, or `{ACTORS}` for "
            "the run's own policy"
        )
    if parts.username or parts.password:
        raise ConfigError(f"`{key}.url` must have no user and password; name the key by key_env or key_file")
