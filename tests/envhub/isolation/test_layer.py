"""Layers: a layer that is extracted and applied again gives the same tree, after any changes."""

import os
import random
import shutil
from pathlib import Path

import pytest

from slipstream.envhub.isolation.file_tree import Tree, file, folder
from slipstream.envhub.isolation.layer import apply_layer, extract_layer, whiteout
from slipstream.envhub.isolation.sandbox import Finished, Place
from tests.envhub.isolation import sandboxed


@pytest.fixture
def base(readable: Path) -> Path:
    made = readable / "base"
    for name, content in (("a/x", "1\n"), ("a/y", "2\n"), ("a/b/z", "3\n"), ("top", "4\n"), ("c/only", "5\n")):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(content)
    (made / "a/link").symlink_to("x")
    (made / "top").chmod(0o755)
    return made


def run(command: str, base: Path, layer: Tree) -> Finished:
    return sandboxed.run(command, layer, place=Place.TESTBED, base=base)


def spoken(top: Path) -> dict[str, object]:
    """All files below `top` in a form that can be compared; folders only by their names."""
    said: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if path.is_symlink():
            said[name] = os.readlink(path)  # noqa: PTH115  a target as it is written
        else:
            said[name] = "folder" if path.is_dir() else (path.stat().st_mode, path.read_bytes())
    return said


def disturb(top: Path, rng: random.Random) -> None:
    """One thing that a command might do to a tree."""
    names = ["x", "y", "b", "z", "new", "link"]
    folders = [top, *(path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]
    path = rng.choice(folders) / rng.choice(names)
    action = rng.randrange(5)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()
    if action == 0:
        path.write_text(rng.choice("123"))
    elif action == 1:
        path.mkdir()
        (path / "x").write_text("1\n")
    elif action == 2:
        path.symlink_to(rng.choice(["x", "nowhere"]))
    elif action == 3:
        path.write_text("1\n")
        path.chmod(0o755)


def test_a_layer_that_is_extracted_and_applied_gives_the_same_tree(base: Path, tmp_path: Path) -> None:
    rng, seen = random.Random(1), set()
    for number in range(80):
        tree, other = tmp_path / f"{number}", tmp_path / f"{number}-again"
        shutil.copytree(base, tree, symlinks=True)
        for _ in range(rng.randrange(6)):
            disturb(tree, rng)
        wanted = spoken(tree)
        extract_layer(str(base), str(tree))
        seen.add(len(list(tree.rglob("*"))))
        shutil.copytree(tree, other, symlinks=True)
        apply_layer(str(base), str(other))
        assert spoken(other) == wanted
        extract_layer(str(base), str(other))
        assert spoken(other) == spoken(tree)
    assert len(seen) > 5 and 0 in seen


def test_a_layer_has_the_changed_files_and_marks_the_deleted_ones(base: Path) -> None:
    done = run("echo new > n; echo 9 > a/x; chmod 600 a/y; rm -r c a/link; mkdir e; mkfifo pipe; pwd", base, {})
    assert done.output == "/testbed\n"
    changed = {"n": file("new\n"), "e": folder(), "a": folder(), "a/x": file("9\n"), "a/y": file("2\n", 0o600)}
    assert done.tree == changed | {whiteout("c"): file(""), whiteout("a/link"): file("")}


def test_a_command_continues_on_the_files_that_the_last_one_left(base: Path) -> None:
    layer = run("rm -r a; echo file > a; mkdir top2; mv top top2/; touch -d @0 top2", base, {}).tree
    assert layer is not None
    shown = run("find . -type f | sort; cat a top2/top; rm a; mkdir a; echo 1 > a/x", base, layer)
    assert shown.output == "./a\n./c/only\n./top2/top\nfile\n4\n"
    assert shown.tree is not None
    assert run("find a; cat a/x", base, shown.tree).output == "a\na/x\n1\n"
    assert run("git -h >/dev/null; cp -a /opt/base/. . && rm -r top2", base, shown.tree).tree == {}


def test_a_base_is_not_changed_by_what_is_done_over_it(base: Path) -> None:
    before = spoken(base)
    done = run("rm -rf ./* /opt/base/*; echo 1 > /opt/base/new; find . | wc -l", base, {})
    assert done.output.endswith("1\n") and "Read-only file system" in done.output
    assert spoken(base) == before


def test_files_without_read_permission_are_kept_and_those_that_cannot_be_kept_are_reported(base: Path) -> None:
    layer = run("mkdir -p d/e; echo 1 > d/e/f; chmod 000 d/e/f d/e d a/x a", base, {}).tree
    assert layer is not None and layer["d/e/f"].content == b"1\n"
    assert run("cat d/e/f a/x", base, layer).output == "1\n1\n"
    done = run("mkdir a/many; cd a/many; touch $(seq 2100)", base, {})
    assert done.tree is None and "the files cannot be kept" in done.output


def test_a_layer_may_replace_a_folder_of_the_base(base: Path) -> None:
    """Layers that no command leaves, but a judge may make: a folder that is new though the base has one."""
    layer: Tree = {whiteout("a"): file(""), "a": folder(), "a/x": file("9\n")}
    assert run("find a | sort; cat a/x", base, layer).output == "a\na/x\n9\n"
