"""Merges files and single settings into a configuration."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from slipstream.common.config.setting_bounds import plain_type
from slipstream.common.process.config_error import ConfigError


def check_presets(files: Sequence[str]) -> None:
    """Raise ConfigError for two presets of the objective: what only the first one sets would remain."""
    objectives = [file for file in files if Path(file).parent.parts[-2:] == ("conf", "objective")]
    if len(objectives) > 1:
        raise ConfigError(
            f"{' and '.join(objectives)} are presets of the whole objective, and what only one of them sets would "
            "remain in the other; give one, and set single keys as in objective.kl_coefficient=0.01"
        )


def read_as_written(changes: Any, written: Any, kind: type) -> None:
    """Undo what YAML 1.1 makes of texts in `changes` to `kind`. Raises ConfigError for numbers that it changes."""
    _keep_texts(changes, written, kind)
    _check_numbers(OmegaConf.to_container(changes), written)


def _keep_texts(changes: Any, written: Any, kind: type) -> None:
    """Set every setting of the section `kind` that is text to what was `written`, where YAML has read a number.

    So `run.name=010` is no run 8, and `1.10` no run 1.1.
    """
    if not (OmegaConf.is_dict(changes) and isinstance(written, Mapping)):
        return
    for item in dataclasses.fields(kind):
        if item.name not in changes or item.name not in written:
            continue
        if dataclasses.is_dataclass(item.type):
            _keep_texts(changes[item.name], written[item.name], item.type)  # type: ignore[arg-type]
        elif plain_type(item.type) is str and isinstance(changes[item.name], int | float):
            changes[item.name] = written[item.name]


def _check_numbers(read: Any, written: Any, path: str = "") -> None:
    """Raise ConfigError for a number that was read as another one: `010` as 8, and `1:30` as 90."""
    if isinstance(read, dict) and isinstance(written, dict):
        for name in read.keys() & written.keys():
            _check_numbers(read[name], written[name], f"{path}.{name}" if path else str(name))
    elif isinstance(read, list) and isinstance(written, list):
        for value, text in zip(read, written, strict=False):
            _check_numbers(value, text, path)
    elif type(read) in (int, float) and isinstance(written, str) and not _is_as_written(read, written):
        raise ConfigError(f"`{path}`: YAML reads {written} as {read}; write {read}, or for a text \"'{written}'\"")


def _is_as_written(read: float, written: str) -> bool:
    try:
        return type(read)(written) == read
    except ValueError:
        return written.lower().lstrip("+-").startswith((".inf", ".nan", "0x"))


def written_in(overrides: Sequence[str]) -> dict[str, Any]:
    """The texts of overrides such as `run.name=010`, by section and key."""
    written: dict[str, Any] = {}
    for override in overrides:
        path, _, text = override.partition("=")
        *parents, name = path.split(".")
        place = written
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[name] = yaml.load(text, yaml.BaseLoader)
    return written


def with_home(value: Any) -> Any:
    """`value` with the home folder instead of a leading `~/` of every text in it, which shells leave after an `=`."""
    match value:
        case str():
            return str(Path(value).expanduser()) if value.startswith("~/") else value
        case dict():
            return {name: with_home(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(map(with_home, value))
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            setattr(value, item.name, with_home(getattr(value, item.name)))
    return value


def merged(config: Any, changes: Any) -> Any:
    """`config` with `changes`. An empty mapping replaces, as in env.mixture={}.

    Options belong to one environment: its changed name, in `env` or in an entry of the mixture, clears them.
    """
    if OmegaConf.is_dict(changes):
        _empty(config, changes)
        if OmegaConf.is_dict(env := changes.get("env")):
            entries = env.get("mixture") or {}
            pairs = [(config.env.mixture[label], entries[label]) for label in entries if label in config.env.mixture]
            for part, change in [(config.env, env), *pairs]:
                if OmegaConf.is_dict(change) and change.get("name", part.name) != part.name:
                    part.options = {}
    return OmegaConf.merge(config, changes)


def _empty(config: Any, changes: Any, path: str = "") -> None:
    """Empty every mapping of `config` that is empty in `changes`. Raises ConfigError for a list in place of keys."""
    for key in [key for key in changes if key in config and OmegaConf.is_config(changes[key])]:
        if OmegaConf.is_config(config[key]) and OmegaConf.is_dict(config[key]) != OmegaConf.is_dict(changes[key]):
            kind = "a mapping of keys" if OmegaConf.is_dict(config[key]) else "a list"
            raise ConfigError(f"`{path}{key}` must be {kind}, got {changes[key]}; correct it")
        if not OmegaConf.is_dict(config[key]):
            continue
        if changes[key]:
            _empty(config[key], changes[key], f"{path}{key}.")
        elif not dataclasses.is_dataclass(OmegaConf.get_type(config, key)):
            config[key] = {}
