"""The secret that a server of ours may require of its clients: from a file or an environment variable."""

import os
from pathlib import Path

SECRET_VARIABLE = "SLIPSTREAM_ENVS_KEY"


def read_secret(file: str, *, option: str, variable: str = SECRET_VARIABLE) -> str:
    """Return the secret in `file`, the value of `option`, else that of the environment `variable`, else "".

    Raises ValueError if the file cannot be read or the secret cannot be sent in a header. No error message contains it.
    """
    try:
        given = Path(file).read_text() if file else os.environ.get(variable, "")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`{option}` {file} cannot be read: {error}; write the secret to that file") from None
    secret = given.strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret or (not secret and (file or given)):
        where = f"`{option}` {file}" if file else variable
        raise ValueError(
            f"{where} must contain printable ASCII without spaces, got {len(secret)} characters; choose another secret"
        )
    return secret


def headers_with(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}
