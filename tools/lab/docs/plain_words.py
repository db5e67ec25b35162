"""`make check`: phrases that docs, comments, strings and configs do not use, each with what to write instead.

python -m slipstream.tools.lab.docs.plain_words [FILE ...]
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

INSTEAD = {
    r"as told": "as configured, as given",
    r"told": "configured, given, notified, asked",
    r"said": "declared, reported, logged",
    r"nobody(?!\"| 65534)": "no process, no one else; or name who",
    r"aloud": "logged, reported",
    r"lets? in|letting in": "accept",
    r"anew": "again",
    r"(?:go|goes|going|went|gone) on": "continue",
    r"at hand": "available",
    r"\w+'s? sake": "for, because of",
    r"such a one": "name the thing",
    r"behind which": "after which",
    r"where none is|(?:that|which|what) is none": "name what is missing or malformed",
    r"without another word": "identically, silently",
    r"whoever reaches": "any client that can connect",
    r"does not \w+ since": "has not ... since",
    r"is no \w+ here": "is not a ...",
}
PATTERN = re.compile(r"\b(?:" + "|".join(f"(?P<p{number}>{phrase})" for number, phrase in enumerate(INSTEAD)) + r")\b")
TEXT_SUFFIXES = {".md", ".yaml", ".lua", ".sh", ".toml"}
PLACES = (
    "actors",
    "common",
    "conf",
    "docs",
    "envhub",
    "learner",
    "replay",
    "src",
    "tests",
    "tools",
    "Makefile",
    "README.md",
    "AGENTS.md",
    "pyproject.toml",
)
SELF = Path(__file__)


def main(arguments: Sequence[str]) -> int:
    """Print every retired phrase with its place; return 1 where there is one."""
    found = [line for path in (map(Path, arguments) if arguments else _all()) for line in retired(path)]
    print("\n".join(found) if found else "plain words: no retired phrase")
    return 1 if found else 0


def retired(path: Path) -> Iterator[str]:
    """`PATH:LINE: PHRASE: what to write instead`, for each phrase in the prose of the file."""
    for number, text in _prose(path):
        for match in PATTERN.finditer(text.lower()):
            instead = list(INSTEAD.values())[int(str(match.lastgroup)[1:])]
            line = number + text.count("\n", 0, match.start())
            yield f"{path}:{line}: {match.group()!r}: write instead: {instead}"


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Pieces of text with the line that each begins at: strings and comments of Python, all of other files."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and _is_prose(path, token.string)):
                yield token.start[0], token.string
    elif path.suffix in TEXT_SUFFIXES or path.name == "Makefile":
        yield 1, path.read_text()


def _is_prose(path: Path, string: str) -> bool:
    """All strings are, but in tests docstrings alone: the others are data."""
    return "tests" not in path.parts or string.startswith('"""')


def _all() -> Iterator[Path]:
    for place in map(Path, PLACES):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and path.resolve() != SELF.resolve():
                yield path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
