"""`slipstream key`: a key for a run's weights, to be copied to every host of it."""

import os
from pathlib import Path

from common.config import Config
from common.config_error import ConfigError
from common.curve import KEY_VARIABLE, new_secret


def make_key(config: Config) -> int:
    """Write a new key to `weights.key_file`, for its owner alone to read. Raises ConfigError."""
    path = Path(config.weights.key_file)
    if not config.weights.key_file:
        raise ConfigError(
            "`weights.key_file` is empty; say where the key is to be written, as weights.key_file=weights.key"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_secret() + "\n")
    except FileExistsError:
        raise ConfigError(f"`weights.key_file` {path} exists; a run's processes need one and the same key") from None
    except OSError as error:
        raise ConfigError(f"`weights.key_file` {path} cannot be written: {error.strerror}") from None
    print(f"{path}: copy it to every host of the run, or set {KEY_VARIABLE} to what it holds")
    return 0
