"""The secret that an environment server may demand and its clients show: from the environment, or from a file."""

import os
from pathlib import Path

SECRET_VARIABLE = "SLIPSTREAM_ENVS_KEY"


def read_secret(file: str, *, option: str) -> str:
    """The secret in `file`, which `option` names, else that of the environment; "" where there is none.

    Raises ValueError for a file that cannot be read, and for what cannot be sent in a header. No message holds it.
    """
    try:
        secret = Path(file).read_text().strip() if file else os.environ.get(SECRET_VARIABLE, "")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`{option}` {file} cannot be read: {error}; write the secret there") from None
    if not (secret.isascii() and secret.isprintable()) or " " in secret or (file and not secret):
        where = f"`{option}` {file}" if file else SECRET_VARIABLE
        raise ValueError(f"{where} must hold one word of printable ASCII, got {len(secret)} characters; choose another")
    return secret


def headers_with(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}
