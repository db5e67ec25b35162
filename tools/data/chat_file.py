"""A file that names a chat server: that of `slipstream collect --server` and `slipstream eval --server`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.yaml_file import read_yaml
from slipstream.envhub.rewards.chat_client import ACTORS, ChatClient
from slipstream.envhub.rewards.client_settings import check_model, check_request, client_of

REQUEST = {"temperature": 1.0, "max_tokens": 4096}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatServer:
    """A model behind a URL, and what is sent with each conversation."""

    client: ChatClient
    model: str
    request: Mapping[str, Any]

    def body(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        """The request for an answer to `messages`."""
        body = {**self.request, "model": self.model, "messages": messages}
        return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def read_chat_file(path: Path) -> ChatServer:
    """Read the file of `--server`. Raises ConfigError."""
    key = str(path)
    found = read_yaml(path, "`--server` ")
    if not isinstance(found, dict) or "url" not in found:
        raise ConfigError(f"`--server` {path} must have url and model, as in docs/collect.md; correct it")
    settings = {str(name): value for name, value in found.items()}
    model, sent = settings.pop("model", ""), settings.pop("request", REQUEST)
    check_model(key, model)
    check_request(key, sent, REQUEST)
    try:
        client = client_of(key, **settings)
    except TypeError as error:
        raise ConfigError(f"`{path}`: {error}; see docs/collect.md") from None
    if client.url == ACTORS:
        raise ConfigError(f"`{key}.url` must be a server's, got {ACTORS!r}, which only a run can ask")
    try:
        client.read_key()
    except ValueError as error:
        raise ConfigError(f"`{path}`: {error}") from None
    server = ChatServer(client=client, model=model, request=dict(sent))
    try:
        server.body([])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{key}.request` must have values of JSON, got {sent}: {error}; correct them") from None
    return server
