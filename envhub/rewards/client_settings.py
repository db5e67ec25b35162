"""Makes a chat client from the settings of a file, with checked values."""

import inspect
import urllib.parse
from collections.abc import Mapping
from typing import Any

from slipstream.common.process.config_error import ConfigError, require
from slipstream.envhub.env_options import is_number, is_server_url
from slipstream.envhub.rewards.chat_client import ACTORS, ChatClient


def client_of(key: str, **settings: Any) -> ChatClient:
    """Make a client with these fields of ChatClient. Raises ConfigError, with `key`; TypeError for an unknown field."""
    bound = inspect.signature(ChatClient).bind(**settings)
    bound.apply_defaults()
    given = bound.arguments
    url, key_env, key_file = given["url"], given["key_env"], given["key_file"]
    if url != ACTORS:
        _check_url(key, url)
    both = isinstance(key_env, str) and isinstance(key_file, str) and not (key_env and key_file)
    require(both, f"{key}.key_env, {key}.key_file", "at most one name", "two", "remove one")
    for name, least in (("max_concurrent", 1), ("max_requests", 0), ("max_total_tokens", 0)):
        check_whole(f"{key}.{name}", given[name], least=least)
    for name in ("max_cost", "input_price", "output_price"):
        is_amount = is_number(given[name]) and given[name] >= 0
        require(is_amount, f"{key}.{name}", ">= 0", given[name], "leave it out for no limit")
    for name in ("timeout_s", "deadline_s"):
        is_time = is_number(given[name]) and given[name] > 0
        require(is_time, f"{key}.{name}", "> 0", given[name], "leave it out for the default")
    max_cost = given["max_cost"]
    priced = not max_cost or given["input_price"] + given["output_price"] > 0
    require(priced, f"{key}.max_cost", "0 without input_price and output_price", max_cost, "give the prices")
    return ChatClient(**given)


def check_request(key: str, request: Any, example: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `request` has more fields of a request than those that we write."""
    own = isinstance(request, Mapping) and not request.keys() & {"model", "messages", "stream", "n"}
    require(
        own, f"{key}.request", "fields of a request, without model and messages", request, f"{example} is the default"
    )


def check_model(key: str, model: Any) -> None:
    require(isinstance(model, str) and model != "", f"{key}.model", "a name", model, "the server's name of a model")


def check_whole(key: str, value: Any, *, least: int, cure: str = "leave it out for the default") -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(is_whole, key, f"a whole number >= {least}", value, cure)


def _check_url(key: str, url: object) -> None:
    if not is_server_url(url):
        raise ConfigError(
            f"`{key}.url` must be like http://host:8000/v1, got {url!r}; give the server's address, or `{ACTORS}` for "
            "the run's own policy"
        )
    if "@" in urllib.parse.urlsplit(str(url)).netloc:
        raise ConfigError(f"`{key}.url` must have no user and password; name the key by key_env or key_file")
