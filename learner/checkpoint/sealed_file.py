"""Small JSON files that contain a hash of their content, so that damage is detected when they are read.

Those of a folder also have the hashes of its other files.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import sync_path, write_whole
from slipstream.common.process.wire import MALFORMED
from slipstream.common.transfer.model_folder import blob_of

S = TypeVar("S", bound=msgspec.Struct)


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    xxh3: str  # 128 bits in hex, over the bytes of `content`
    content: msgspec.Raw


def write_sealed(path: Path, content: msgspec.Struct, *, schema: int) -> None:
    """Replace `path` atomically; it is on disk when this returns."""
    body = msgspec.json.encode(content)
    sealed = _Sealed(schema=schema, xxh3=xxhash.xxh3_128_hexdigest(body), content=msgspec.Raw(body))
    write_whole(path, msgspec.json.encode(sealed))
    sync_path(path.parent)


def read_sealed(path: Path, kind: type[S], *, schema: int, cure: str) -> S:
    """Read what `write_sealed` wrote. Raises ConfigError if the file is missing, damaged or of another schema.

    The message names the file and the problem, and ends with `cure`, what to do.
    """
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        body = bytes(sealed.content)
        if sealed.xxh3 != xxhash.xxh3_128_hexdigest(body):
            raise ConfigError(f"{path} is damaged: its content does not match its hash; {cure}")
        if sealed.schema != schema:
            raise ConfigError(f"{path} has schema {sealed.schema}, but this version reads schema {schema}; {cure}")
        return msgspec.json.decode(body, type=kind)
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{path} is damaged: {error}; {cure}") from error


def check_file(path: Path, xxh3: str) -> None:
    """Raise ConfigError unless the file at `path` has this hash, which is that of `blob_of`. Reads all of it."""
    try:
        is_whole = blob_of(path).root == xxh3
    except OSError as error:
        raise ConfigError(f"{path} is damaged: {error}; restore it from a copy") from error
    if not is_whole:
        raise ConfigError(f"{path} is damaged: it does not match its hash; restore it from a copy")
