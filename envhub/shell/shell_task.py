"""Draws a tree of files and a job on it: a question or a change, the bash command that does it, and the result."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.envhub.isolation.file_tree import Node, Tree, file, folder
from slipstream.envhub.name_list import name_list

FOLDERS = name_list(
    """
    archive, backup, config, data, drafts, export, import, logs, notes, reports, scripts, shared, temp, vault
    """
)
STEMS = name_list(
    """
    alpha, bravo, delta, echo, foxtrot, golf, hotel, india, juliet, kilo, lima, mike, oscar, papa, quebec,
    romeo, sierra, tango, uniform, victor, whiskey, yankee
    """
)
ENDINGS = ("txt", "log", "csv", "conf", "md")
WORDS = ("error", "warning", "started", "stopped", "login", "logout", "timeout", "retry", "saved", "loaded")
KEYS = ("apple", "banana", "cherry", "grape", "lemon", "mango", "olive", "peach", "pear", "plum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    text: str
    bash: str  # the command that shows the answer or makes the change
    answer: str = ""  # of a question
    result: Tree | None = None  # of a change: the files afterwards
    processes: tuple[str, ...] = ()  # the names of those that run at the start
    left: tuple[str, ...] = ()  # `processes` after a change, with "" for the one to end


def draw_tree(rng: random.Random, *, num_files: int) -> Tree:
    """Return a tree with five folders, one of them in another, and `num_files` files: text, key=value lines or CSV."""
    tops = rng.sample(FOLDERS, 4)
    places = [*tops, f"{tops[0]}/{rng.choice([name for name in FOLDERS if name not in tops])}"]
    tree: Tree = {place: folder() for place in places}
    while len(tree) < len(places) + num_files:
        ending = rng.choice(ENDINGS)
        tree[f"{rng.choice(places)}/{rng.choice(STEMS)}.{ending}"] = file(_content(rng, ending))
    return tree


def draw_job(rng: random.Random, tree: Tree, *, task: str) -> Job:
    kinds = {"read": READS, "write": WRITES, "processes": PROCESSES, "any": READS + WRITES + PROCESSES}[task]
    return rng.choice(kinds)(rng, tree)


def _content(rng: random.Random, ending: str) -> str:
    num_lines = rng.randrange(5, 40)
    if ending == "csv":
        return "".join(f"{rng.choice(KEYS)},{rng.randrange(1, 500)}\n" for _ in range(num_lines))
    if ending == "conf":
        return "".join(f"{key}={rng.randrange(1000, 10000)}\n" for key in rng.sample(KEYS, min(num_lines, len(KEYS))))
    return "".join(f"{rng.choice(WORDS)} {rng.choice(KEYS)} {rng.choice(KEYS)}\n" for _ in range(num_lines))


def _files(tree: Tree, *endings: str) -> list[str]:
    return [path for path, node in sorted(tree.items()) if node.kind == "file" and path.endswith(endings)]


def _lines(tree: Tree, path: str) -> list[str]:
    return tree[path].content.decode().splitlines()


def _pick(rng: random.Random, tree: Tree, *endings: str) -> str:
    """Return a random file with one of the endings, or any file if no name has one."""
    return rng.choice(_files(tree, *endings) or _files(tree, ""))


def _top(rng: random.Random, tree: Tree) -> str:
    return rng.choice(sorted({path.split("/")[0] for path in _files(tree, "")}))


def _count_files(rng: random.Random, tree: Tree) -> Job:
    top, ending = _top(rng, tree), rng.choice(ENDINGS)
    found = [path for path in _files(tree, f".{ending}") if path.startswith(f"{top}/")]
    return Job(
        text=f"How many files whose names end in .{ending} are there in {top} and everywhere below it?",
        bash=f"find {top} -type f -name '*.{ending}' | wc -l",
        answer=str(len(found)),
    )


def _count_lines(rng: random.Random, tree: Tree) -> Job:
    path, word = _pick(rng, tree, ".txt", ".log", ".md"), rng.choice(WORDS)
    count = sum(word in line for line in _lines(tree, path))
    return Job(text=f"How many lines of {path} contain {word}?", bash=f"grep -c {word} {path}", answer=str(count))


def _sum_column(rng: random.Random, tree: Tree) -> Job:
    path, key = _pick(rng, tree, ".csv"), rng.choice(KEYS)
    rows = [line.split(",") for line in _lines(tree, path)]
    total = sum(int(row[1]) for row in rows if row[0] == key and len(row) == 2)
    return Job(
        text=f"What is the sum of the numbers in {path}, over the rows that begin with {key}?",
        bash=f"awk -F, '$1 == \"{key}\" {{ total += $2 }} END {{ print total + 0 }}' {path}",
        answer=str(total),
    )


def _value_of(rng: random.Random, tree: Tree) -> Job:
    path, key = _pick(rng, tree, ".conf"), rng.choice(KEYS)
    values = [line.partition("=")[2] for line in _lines(tree, path) if line.startswith(f"{key}=")]
    return Job(text=f"Which value does {path} give to {key}?", bash=f"grep '^{key}=' {path}", answer="".join(values))


def _file_with(rng: random.Random, tree: Tree) -> Job:
    paths = _files(tree, ".conf")
    numbers = [(path, line.partition("=")[2]) for path in paths for line in _lines(tree, path)]
    path, number = rng.choice(numbers) if numbers else ("", "0000")
    holders = [other for other in _files(tree, "") if number in tree[other].content.decode()]
    return Job(
        text=f"Which one file contains {number}? Give its path, as in folder/name.",
        bash=f"grep -rl {number} *",
        answer=path if len(holders) == 1 else "",
    )


def _move_files(rng: random.Random, tree: Tree) -> Job:
    source, target = _top(rng, tree), rng.choice([name for name in FOLDERS if name not in tree])
    ending = rng.choice(ENDINGS)
    moved = [path for path in _files(tree, f".{ending}") if path.rpartition("/")[0] == source]
    result = {path: node for path, node in tree.items() if path not in moved}
    result |= {target: folder()} | {f"{target}/{path.rpartition('/')[2]}": tree[path] for path in moved}
    return Job(
        text=f"Make a folder {target}, and move into it the files that lie in {source} itself and end in .{ending}.",
        bash=f"mkdir {target} && mv {source}/*.{ending} {target}/",
        result=result if moved else tree,
    )


def _delete_with(rng: random.Random, tree: Tree) -> Job:
    top, word = _top(rng, tree), rng.choice(WORDS)
    found = [path for path in _files(tree, "") if path.startswith(f"{top}/") and word in tree[path].content.decode()]
    return Job(
        text=f"Delete every file in {top} and below it that contains the word {word}.",
        bash=f"grep -rlw {word} {top} | xargs -r rm",
        result={path: node for path, node in tree.items() if path not in found},
    )


def _sort_unique(rng: random.Random, tree: Tree) -> Job:
    path, target = _pick(rng, tree, ".txt", ".log", ".md"), f"{rng.choice(STEMS)}.sorted"
    lines = "".join(f"{line}\n" for line in sorted(set(_lines(tree, path))))
    return Job(
        text=f"Write the lines of {path} into {target}, sorted, each of them once.",
        bash=f"LC_ALL=C sort -u {path} > {target}",
        result={**tree, target: file(lines)},
    )


def _replace_word(rng: random.Random, tree: Tree) -> Job:
    path, old, new = _pick(rng, tree, ".txt", ".log", ".md"), rng.choice(WORDS), rng.choice(STEMS)
    content = tree[path].content.decode().replace(old, new)
    return Job(
        text=f"In {path}, replace {old} by {new} wherever it stands.",
        bash=f"sed -i 's/{old}/{new}/g' {path}",
        result={**tree, path: Node(kind="file", content=content.encode(), mode=tree[path].mode)},
    )


def _make_executable(rng: random.Random, tree: Tree) -> Job:
    path, word = f"{_top(rng, tree)}/{rng.choice(STEMS)}.sh", rng.choice(KEYS)
    return Job(
        text=f"Write a script {path} of the one line `echo {word}`, with the mode 755.",
        bash=f"echo 'echo {word}' > {path} && chmod 755 {path}",
        result={**tree, path: file(f"echo {word}\n", 0o755)},
    )


def _draw_processes(rng: random.Random) -> tuple[str, ...]:
    """Return six names. Some of them share a prefix."""
    stems = rng.sample(STEMS, 3)
    return tuple(rng.sample([f"{stem}-{word}" for stem in stems for word in WORDS], 6))


def _count_processes(rng: random.Random, tree: Tree) -> Job:
    processes = _draw_processes(rng)
    stem, word = rng.choice(processes).partition("-")[0], rng.choice(processes).partition("-")[2]
    return Job(
        text=f"How many processes are running whose names begin with {stem}- or end in -{word}?",
        bash=f"grep -lE '^{stem}-|-{word}$' /proc/[0-9]*/cmdline | wc -l",
        answer=str(sum(name.startswith(f"{stem}-") or name.endswith(f"-{word}") for name in processes)),
        processes=processes,
    )


def _end_process(rng: random.Random, tree: Tree) -> Job:
    processes = _draw_processes(rng)
    ended = rng.choice(processes)
    return Job(
        text=f"End the process whose name is {ended}, and no other one.",
        bash=f"kill $(grep -l '^{ended}' /proc/[0-9]*/cmdline | cut -d/ -f3)",
        result=tree,
        processes=processes,
        left=tuple("" if name == ended else name for name in processes),
    )


_Draw = Callable[[random.Random, Tree], Job]
READS: tuple[_Draw, ...] = (_count_files, _count_lines, _sum_column, _value_of, _file_with)
WRITES: tuple[_Draw, ...] = (_move_files, _delete_with, _sort_unique, _replace_word, _make_executable)
PROCESSES: tuple[_Draw, ...] = (_count_processes, _end_process)
