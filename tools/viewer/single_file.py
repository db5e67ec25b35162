"""Writes the viewer with the data of some steps as one HTML file, which needs no server."""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import write_whole
from slipstream.tools.viewer.pages import Pages
from slipstream.tools.viewer.server import FOLDER

MAX_FILE_CHARS = 256 << 20  # a browser loads the whole file


def write_file(pages: Pages, target: Path, *, steps: Sequence[int]) -> Path:
    """Write every page of `steps` to `target` and return it.

    Raises ConfigError if that is too much for one file, or if it cannot be written.
    """
    script, style = (FOLDER / "viewer.js").read_text(), (FOLDER / "viewer.css").read_text()
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; base-uri 'none'"
    whole = (FOLDER / "viewer.html").read_text()
    for old, new in (
        ("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'),
        ('<link rel="stylesheet" href="viewer.css">', f"<style>{style}</style>"),
        (
            '<script src="viewer.js"></script>',
            f'<script type="application/json" id="pages">{_data(pages, steps)}</script>\n<script>{script}</script>',
        ),
    ):
        if whole.count(old) != 1:
            raise ValueError(f"viewer.html must contain {old} exactly once")
        whole = whole.replace(old, new)
    try:
        write_whole(target, whole)
    except OSError as error:
        raise ConfigError(f"--file {target} cannot be written: {error.strerror}; give another path") from error
    return target


def _data(pages: Pages, steps: Sequence[int]) -> str:
    """Every page of `steps` by path, as JSON in which no tag can begin or end."""
    parts, num_chars = [_entry("run", pages.run(steps))], 0
    for step in steps:
        for path in _paths(pages, step):
            parts.append(_entry(path, pages.page(path)))
            num_chars += len(parts[-1])
            if num_chars > MAX_FILE_CHARS:
                raise ConfigError(f"steps {steps[0]} to {steps[-1]} are too much for one file; give fewer by --steps")
    return "{" + ",\n".join(parts) + "}"


def _paths(pages: Pages, step: int) -> list[str]:
    paths = [f"steps/{step}"]
    for group in pages.page(paths[0])["groups"]:
        path = f"steps/{step}/groups/{group['group_id']}"
        paths += [path, *(f"{path}/members/{member['member']}" for member in group["members"])]
    return paths


def _entry(path: str, value: object) -> str:
    return f"{json.dumps(path)}:{json.dumps(value, allow_nan=False)}".replace("<", "\\u003c")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
