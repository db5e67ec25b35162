"""A file that names a chat server: that of `slipstream collect --server`, and of `slipstream data --paraphrase`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.yaml_file import read_yaml
from slipstream.envhub.rewards.chat_client import ACTORS, ChatClient
from slipstream.envhub.rewards.client_settings import check_model, check_request, client_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatServer:
    """A model behind a URL, and what is sent with each conversation."""

    client: ChatClient
    model: str
    request: Mapping[str, Any]

    def body(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        """The request for an answer to `messages`."""
        return json.dumps({**self.request, "model": self.model, "messages": messages}, sort_keys=True).encode()


def read_chat_file(
    path: Path, *, option: str, page: str, request: Mapping[str, Any], others: Sequence[str] = ()
) -> tuple[ChatServer, dict[str, Any]]:
    """Read the file of `option`, which `page` describes. Return its server, and its settings named in `others`.

    `request` is sent if the file has none. Raises ConfigError.
    """
    key = str(path)
    found = read_yaml(path, f"`{option}` ")
    if not isinstance(found, dict) or "url" not in found:
        raise ConfigError(f"`{option}` {path} must have url and model, as in {page}; correct it")
    settings = {str(name): value for name, value in found.items()}
    other = {name: settings.pop(name) for name in others if name in settings}
    model, sent = settings.pop("model", ""), settings.pop("request", request)
    check_model(key, model)
    check_request(key, sent, request)
    try:
        client = client_of(key, **settings)
    except TypeError as error:
        raise ConfigError(f"`{path}`: {error}; see {page}") from None
    if client.url == ACTORS:
        raise ConfigError(f"`{key}.url` must be a server's, got {ACTORS!r}, which only a run can ask")
    try:
        client.read_key()
    except ConfigError as error:
        raise ConfigError(f"`{path}`: {error}") from None
    return ChatServer(client=client, model=model, request=dict(sent)), other
