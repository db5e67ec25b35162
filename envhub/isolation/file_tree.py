"""A tree of files as a value, and as a tar (ustar), the format in which it enters and leaves a sandbox.

A tar that leaves a sandbox was written by untrusted code. So this module reads it itself: forward only, with limits,
and without writing anything to the host's disk.
"""

import io
import tarfile

import msgspec

BLOCK = 512
MAX_NODES = 2000
MAX_PATH_BYTES = 99  # the length of ustar's name field

_FILE, _LINK, _FOLDER = b"0", b"2", b"5"


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with its content, a link with its target, or a folder with nothing."""

    kind: str  # "file", "link" or "folder"
    content: bytes = b""
    mode: int = 0o644


Tree = dict[str, Node]  # by path, without a leading slash


class TreeError(ValueError):
    """The bytes are not a valid tree."""


def file(text: str, mode: int = 0o644) -> Node:
    return Node(kind="file", content=text.encode(), mode=mode)


def folder(mode: int = 0o755) -> Node:
    return Node(kind="folder", mode=mode)


def pack(tree: Tree) -> bytes:
    """Return the tar of `tree`: the same bytes for equal trees."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(tree):
            node, info = tree[path], tarfile.TarInfo(path)
            info.mode = node.mode
            if node.kind == "folder":
                info.type = tarfile.DIRTYPE
            elif node.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, node.content.decode(errors="surrogateescape")
            else:
                info.size = len(node.content)
            archive.addfile(info, io.BytesIO(node.content))
    return buffer.getvalue()


def unpack(content: bytes) -> Tree:
    """Return the files, links and folders in a tar. Raises TreeError if it is malformed or too large."""
    tree: Tree = {}
    start = 0
    while start + BLOCK <= len(content):
        header = content[start : start + BLOCK]
        if header == bytes(BLOCK):
            return tree
        size, start = _octal(header[124:136]), start + BLOCK
        if start + size > len(content):
            break
        node = _node(header, content[start : start + size])
        start += -(-size // BLOCK) * BLOCK
        path = _path(header)
        if path in tree:
            raise TreeError(f"duplicate path: {path!r}")
        if node is not None and path:
            tree[path] = node
        if len(tree) > MAX_NODES:
            raise TreeError(f"more than {MAX_NODES} files")
    raise TreeError("truncated tar")


def _node(header: bytes, content: bytes) -> Node | None:
    kind, mode = header[156:157], _octal(header[100:108]) & 0o777
    if kind == _FILE:
        return Node(kind="file", content=content, mode=mode)
    if kind == _FOLDER:
        return Node(kind="folder", mode=mode)
    return Node(kind="link", content=_text(header[157:257]), mode=0o777) if kind == _LINK else None


def _path(header: bytes) -> str:
    """Return the path without `./`; empty for the root. Rejects invalid UTF-8, which could make two names equal."""
    prefix, name = _text(header[345:500]), _text(header[:100])
    encoded = prefix + b"/" + name if prefix else name
    try:
        path = encoded.decode().strip("/")
    except UnicodeDecodeError:
        raise TreeError(f"a file name that is not valid UTF-8: {encoded[:80]!r}") from None
    path = "" if path == "." else path.removeprefix("./").strip("/")
    if ".." in path.split("/") or len(path.encode()) > MAX_PATH_BYTES:
        raise TreeError(f"a path that contains .. or is longer than {MAX_PATH_BYTES} bytes: {path[:80]!r}")
    return path


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if len(digits) > 11 or not all(byte in b"01234567" for byte in digits):
        raise TreeError(f"not an octal number: {field!r}")
    return int(digits or b"0", 8)
