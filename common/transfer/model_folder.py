"""A model's folder: its files, for hosts that do not have it, and the root hash of its weights."""

import hashlib
import json
import logging
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash
from safetensors import SafetensorError, safe_open

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import read_json
from slipstream.common.process.wire import MALFORMED
from slipstream.common.transfer.chunks import Blob, ChunkRequest

MAX_FILES = 4096
SHAPES = "slipstream_shapes.json"  # made for hosts without the weights: {name of a tensor: shape}
# No folder, no code, no pickle: what transformers and vLLM read as data. Other files are not sent.
_FILE_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(json|txt|model|jinja|tiktoken|safetensors)\Z"
_WEIGHTS = (".safetensors", ".safetensors.index.json")

log = logging.getLogger(__name__)


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a model's folder, which a host can pull by its hash."""

    name: Annotated[str, msgspec.Meta(pattern=_FILE_NAME)]
    blob: Blob  # its root is xxh3-128 of the file's bytes


class _Index(msgspec.Struct):
    """Which file has each tensor."""

    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # from the end of the header


def model_files(folder: Path, *, with_weights: bool) -> list[ModelFile]:
    """The files of a model's folder that other hosts need, hashed. Without the weights, their shapes are among them.

    Raises ConfigError if the weights are missing or damaged, or there are too many files.
    """
    shapes = _shapes_file(folder)
    sent = [path for path in sorted(folder.iterdir()) if _is_sent(path, with_weights=with_weights)]
    files = [ModelFile(name=path.name, blob=blob_of(path)) for path in sent]
    if not with_weights:
        blob = Blob(root=xxhash.xxh3_128_hexdigest(shapes), num_bytes=len(shapes))
        files.append(ModelFile(name=SHAPES, blob=blob))
    if len(files) > MAX_FILES:
        raise ConfigError(f"`model.path` {folder} has {len(files)} files of a model, the limit is {MAX_FILES}")
    return files


def _is_sent(path: Path, *, with_weights: bool) -> bool:
    if path.name == SHAPES or not re.match(_FILE_NAME, path.name) or not path.is_file():
        return False
    return (with_weights or not path.name.endswith(_WEIGHTS)) and is_own(path)


def is_own(path: Path) -> bool:
    """Whether a file is in its folder, or is a link to a file in it or in the cache of Hugging Face that it is of.

    Other links are logged: what they lead to is not a part of the model, and is given to no one.
    """
    folder, target = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return True
    log.warning("%s is a link out of its folder, and is not given to others; copy the file there if they need it", path)
    return False


def _shapes_file(folder: Path) -> bytes:
    return json.dumps(tensor_shapes(folder), sort_keys=True).encode()


class OfferedFolder:
    """Reads the bytes of `model_files`, for those that pull them."""

    def __init__(self, folder: Path, files: list[ModelFile]) -> None:
        """Raises ConfigError if the shapes of the weights are offered and `folder` has no weights."""
        own = [file for file in files if file.name != SHAPES and is_own(folder / file.name)]
        self._paths = {file.blob.root: folder / file.name for file in own}
        self._made = {file.blob.root: _shapes_file(folder) for file in files if file.name == SHAPES}

    def read(self, request: ChunkRequest) -> bytes | None:
        """The requested bytes; None if no file has this hash. The receiver checks them. Raises OSError."""
        if (made := self._made.get(request.root)) is not None:
            return made[request.offset : request.offset + request.num_bytes]
        path = self._paths.get(request.root)
        if path is None:
            return None
        with path.open("rb") as file:
            file.seek(request.offset)
            return file.read(request.num_bytes)


def blob_of(path: Path) -> Blob:
    """Size and hash of the file at `path`: 0.2 s per GB if the disk is fast enough. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return Blob(root=digest.hexdigest(), num_bytes=file.tell())


def has_file(folder: Path, file: ModelFile) -> bool:
    """Whether `folder` has this file with these bytes."""
    path = folder / file.name
    try:
        return path.stat().st_size == file.blob.num_bytes and blob_of(path) == file.blob
    except OSError:
        return False


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor, by name: of the weights, or declared in a folder that was pulled without them.

    Raises ConfigError if there are neither, or the weights are damaged.
    """
    shapes = {name: tensor.shape for file in weight_files(folder) for name, tensor in _header(file).items()}
    if not shapes and (folder / SHAPES).is_file():
        shapes = read_json(folder / SHAPES, dict[str, list[int]], cure="remove the folder, to pull it again")
    if not shapes:
        raise ConfigError(f"`model.path` {folder} has no *.safetensors files; save the model with save_pretrained")
    return shapes


def check_not_quantised(folder: Path) -> None:
    """Raise ConfigError for weights in fewer bits than they are trained in, by the folder's config.json."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # others say what is wrong with it
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict) and isinstance(quantised := part.get("quantization_config"), dict):
            raise ConfigError(
                f"`model.path` {folder} has quantised weights ({quantised.get('quant_method', 'unknown')}), which "
                "cannot be trained; use a folder in bfloat16: docs/models.md, Quantised weights, says how to write one"
            )


def has_weights(folder: Path) -> bool:
    """Whether the folder contains whole weights: one that was pulled for whole-weight training has none."""
    try:
        return bool(weight_files(folder))
    except ConfigError as error:
        log.warning("%s", error)
        return False


def folder_root(folder: Path) -> str:
    """xxh3-128 in hex over the name, dtype, shape and bytes of every tensor; their distribution over files is ignored.

    Folders with the same root have the same weights. It reads every file: 0.1 s per GB if the disk is fast enough.
    Raises ConfigError if there are no tensors, or damaged ones.
    """
    tensors = {
        name: [tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(data)]
        for file in weight_files(folder)
        for name, tensor, data in _tensors(file)
    }
    if not tensors:
        raise ConfigError(f"`model.path` {folder} has no *.safetensors files; save the model with save_pretrained")
    return xxhash.xxh3_128_hexdigest(json.dumps(tensors, sort_keys=True).encode())


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers and vLLM read: those that the index names, else `model.safetensors`, else all.

    A folder may have others beside them, such as the same weights in their maker's own format. Raises ConfigError for
    an index that cannot be read, or that names a missing file, and for a file that is not one of safetensors.
    """
    files = _named_files(folder)
    for file in files:
        _header(file)
    return files


def _named_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except MALFORMED as error:
            raise ConfigError(f"{index} is not an index of safetensors files: {error}; download it again") from error
        files = sorted(folder / Path(name).name for name in names)
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{index} names {missing[0]}, which {folder} does not have; download it again")
        return files
    whole = folder / "model.safetensors"
    # A pipe without a writer would never be read.
    return [whole] if whole.is_file() else sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def _tensors(file: Path) -> Iterator[tuple[str, _Tensor, memoryview]]:
    """Name, header and bytes of each tensor. Raises ConfigError."""
    tensors = _header(file)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        begin = 8 + int.from_bytes(mapped[:8], "little")
        with memoryview(mapped) as data:
            for name, tensor in tensors.items():
                start, stop = tensor.data_offsets
                with data[begin + start : begin + stop] as held:
                    yield name, tensor, held


def _header(file: Path) -> dict[str, _Tensor]:
    """The tensors of a safetensors file by name: https://github.com/huggingface/safetensors#format.

    Raises ConfigError unless they fill the file, each with the bytes of its shape and dtype.
    """
    try:
        with safe_open(file, framework="np"):  # it checks all of that
            pass
    except SafetensorError as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}; download it again, or save it again") from None
    with file.open("rb") as opened:
        header = msgspec.json.decode(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return msgspec.convert(header, dict[str, _Tensor])
