"""Resolves the id of a model on the Hugging Face Hub to a folder on this machine."""

import re
from pathlib import Path

from slipstream.common.process.config_error import ConfigError, reason

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Weights and what reads text, without pickled weights and without code.
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]


def local_model(path: str) -> str:
    """The folder of `path`: of the snapshot, for an id such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`.

    It is downloaded into the Hub's cache if it is not there. A path to a folder, and one into an existing folder, is
    returned as it is. Raises ConfigError if the model can neither be found nor downloaded.
    """
    if ID.fullmatch(path) is None or Path(path).parent.is_dir():
        return path
    from huggingface_hub import snapshot_download  # here: most runs have a folder, and need not wait for it

    name, _, revision = path.partition("@")
    try:
        return str(snapshot_download(name, revision=revision or None, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # all errors of the Hub's client, of the network and of the disk
        raise ConfigError(
            f"`model.path` {path} is not a folder here, and was not found on the Hugging Face Hub: {reason(error)}; "
            "check the name, `hf auth login` for a gated model, or `hf download` it where there is a network and copy "
            "the folder"
        ) from error
