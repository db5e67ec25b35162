"""The difference between a tree of files and a base folder: applied before a command, extracted after it.

A layer has the format of container images' layers (OCI image layer specification): the files that are new or changed,
and an empty file `.wh.NAME` for each deleted NAME. The modes of folders that the base has are not part of it.

The sandbox runs this file with the system's Python, twice for each command and over thousands of files. So it imports
little, and only modules of the standard library.
"""
# Importing pathlib takes as long as the rest of this program, and using it takes much longer for each file.
# ruff: noqa: PTH106, PTH107, PTH115, PTH118, PTH123, PTH208

import os
import posixpath
import stat
import subprocess
import sys

WHITEOUT = ".wh."
CHUNK_BYTES = 1 << 20


def whiteout(path: str) -> str:
    """Return the path in a layer that marks `path` as deleted."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, WHITEOUT + name)


def apply_layer(base: str, tree: str) -> None:
    """Add to `tree`, which is a layer, everything else that `base` has. Raises OSError, CalledProcessError."""
    names = set(os.listdir(tree))
    deleted_names = {
        name for name in names if name.startswith(WHITEOUT) and _kind(os.path.join(tree, name)) == stat.S_IFREG
    }
    hidden = {name.removeprefix(WHITEOUT) for name in deleted_names}
    untouched = [name for name in sorted(os.listdir(base)) if name not in names and name not in hidden]
    if untouched:
        sources = [os.path.join(base, name) for name in untouched]
        subprocess.run(["cp", "-a", "-t", tree, "--", *sources], check=True)
    for name in names:
        below, of_base = os.path.join(tree, name), os.path.join(base, name)
        if name in deleted_names:
            os.remove(below)
        elif _kind(below) == _kind(of_base) == stat.S_IFDIR and name not in hidden:
            apply_layer(of_base, below)


def extract_layer(base: str, tree: str) -> None:
    """Reduce `tree` to its layer over `base`. Only files, folders and links are kept. Raises OSError."""
    left = set()
    for name in os.listdir(tree):
        below, of_base = os.path.join(tree, name), os.path.join(base, name)
        kind = _kind(below)
        if kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            os.remove(below)
            continue
        left.add(name)
        if kind != _kind(of_base):
            continue
        if kind == stat.S_IFDIR:
            extract_layer(of_base, below)
            if not os.listdir(below):
                os.rmdir(below)
        elif _is_same(below, of_base):
            os.remove(below)
    for name in os.listdir(base):
        if name not in left:
            with open(os.path.join(tree, WHITEOUT + name), "x"):
                pass


def _kind(path: str) -> int:
    """Return the file type of `path`, without following links; 0 if it does not exist."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return 0


def _is_same(path: str, other: str) -> bool:
    """Whether two files, or two links, have the same content and mode."""
    one, two = os.lstat(path), os.lstat(other)
    if stat.S_ISLNK(one.st_mode):
        return os.readlink(path) == os.readlink(other)
    if (one.st_mode, one.st_size) != (two.st_mode, two.st_size):
        return False
    with open(path, "rb") as this, open(other, "rb") as that:
        while chunk := this.read(CHUNK_BYTES):
            if chunk != that.read(CHUNK_BYTES):
                return False
    return True


if __name__ == "__main__":
    {"apply": apply_layer, "extract": extract_layer}[sys.argv[1]](*sys.argv[2:])
