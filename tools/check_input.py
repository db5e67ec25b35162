"""What can be seen to be wrong with a configuration before anything is started: in seconds, without torch."""

import asyncio
import difflib
import ipaddress
import json
import socket
from pathlib import Path

from common.action_format import FORMATS
from common.config import Config
from common.config_error import ConfigError
from common.env_config import EnvConfig
from common.run_dir import RunDir
from envhub.catalogue import DRIVING, make_any_env
from learner.objective.coherence import check_coherence

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def check_input(config: Config) -> None:
    """Check what a learner needs that its configuration only names. Raises ConfigError."""
    check_coherence(config)
    check_env(config.env)
    for part in config.env.parts().values():
        if part.name in DRIVING and (config.warm_start.episodes or not config.model.path):
            raise ConfigError(
                f"`env.name` {part.name} has no expert to imitate, or to learn a tiny model's words from; set "
                "`model.path`, and leave `warm_start.episodes` at 0"
            )
    if config.model.path:
        check_model_folder(Path(config.model.path), max_tokens=config.model.max_tokens)
    check_host(config.weights.host)
    _check_disk(config)


def check_env(env: EnvConfig) -> None:
    """Raise ConfigError unless `env.name` with `env.options` makes an environment, and `env.action_format` is known."""
    if env.action_format not in FORMATS:
        near = difflib.get_close_matches(env.action_format, FORMATS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see common/action_format.py"
        raise ConfigError(f"`env.action_format` must be one of {', '.join(FORMATS)}, got {env.action_format!r}; {hint}")
    for part in env.parts().values():
        try:
            asyncio.run(make_any_env(part.name, part.options).close())
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # a user's own code, whatever it raises
            raise ConfigError(f"`env.name` {part.name!r} cannot be made: {type(error).__name__}: {error}") from error


def check_model_folder(folder: Path, *, max_tokens: int) -> None:
    """Raise ConfigError unless `folder` holds what a chat model of `max_tokens` needs."""
    if not folder.is_dir():
        raise ConfigError(
            f"`model.path` {folder} is no folder here; models are not downloaded: `hf download NAME --local-dir FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"`model.path` {folder} is not a Hugging Face model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"`model.path` {folder} has no weights; save them as safetensors (save_pretrained)")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"`model.path` {folder} has no tokenizer; save one beside the weights (save_pretrained)")
    has_template = any((folder / name).is_file() for name in TEMPLATE_FILES)
    if not has_template and "chat_template" not in _read_json(folder / "tokenizer_config.json"):
        raise ConfigError(f"`model.path` {folder}: its tokenizer has no chat template; Slipstream trains chat models")
    longest = _read_json(folder / "config.json").get("max_position_embeddings", max_tokens)
    if isinstance(longest, int) and longest < max_tokens:
        raise ConfigError(
            f"`model.max_tokens` must be <= {longest}, the context of the model in {folder}, got {max_tokens}; lower it"
        )


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"`model.path`: {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"`model.path`: {path} must hold a JSON object, got a {type(content).__name__}")
    return content


def check_host(host: str) -> None:
    """Raise ConfigError unless weights can be served at `host`."""
    try:
        address = ipaddress.IPv4Address(host)
        if address.is_unspecified:
            raise ConfigError(f"`weights.host` {host} is no address that actors could connect to; name one interface's")
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (ipaddress.AddressValueError, OSError) as error:
        raise ConfigError(
            f"`weights.host` must be an IPv4 address of this machine, as actors reach it; {host!r} cannot be bound: "
            f"{error}"
        ) from None


def _check_disk(config: Config) -> None:
    """Raise ConfigError where the run's weights would lie among the other files of the run."""
    disk = Path(config.weights.disk.removeprefix("file://")).absolute()
    run = RunDir(config.run.root, config.run.name).path.absolute()
    if config.weights.disk and run.is_relative_to(disk / config.run.name):
        raise ConfigError(
            f"`weights.disk` {config.weights.disk} would have weights among the files of the run in {run}; name "
            "another folder"
        )
