"""`slipstream access key`: write a new key that encrypts weight transfers; every host of the run needs a copy."""

import os
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.transfer.encryption import KEY_VARIABLE, new_secret


def make_key(config: Config) -> int:
    """Write a new key to `weights.key_file`, readable only by its owner. Raises ConfigError."""
    path = Path(config.weights.key_file)
    if not config.weights.key_file:
        raise ConfigError(
            "`weights.key_file` is empty; name the file to write the key to, for example weights.key_file=weights.key"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(new_secret() + "\n")
    except OSError as error:
        if path.exists():
            raise ConfigError(
                f"`weights.key_file` {path} exists and is not overwritten: all processes of a run need the same key; "
                "use it, or name another file"
            ) from None
        raise ConfigError(f"`weights.key_file` {path} cannot be written: {error.strerror}; name another file") from None
    print(f"wrote {path}; copy it to every host of the run, or set {KEY_VARIABLE} to its content there")
    return 0
