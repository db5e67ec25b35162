"""`slipstream view RUN [RUN ...]`: one page about runs, in a browser or as a file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import held, write_whole
from slipstream.common.process.run_dir import RunDir, find_run, run_of
from slipstream.tools.data.row_files import check_writable
from slipstream.tools.see.report_page import digest, page, report_of
from slipstream.tools.viewer.archive_pages import STEPS_A_PAGE, ArchivePages
from slipstream.tools.viewer.page_server import serve
from slipstream.tools.viewer.view_options import ViewOptions

HEADER = """<header><nav id="trail"></nav><a href="#from/0">steps</a><form id="search">\
<input name="text" placeholder="search all steps" maxlength="1000"></form></header>
"""
MAX_FILE_CHARS = 256 << 20  # a browser loads the whole file


def view(config: Config, *, runs: Sequence[str], force: bool, options: ViewOptions) -> int:
    """Serve the page of the run, which opens on its report, or write it; return 0. Raises ConfigError, NotRecorded."""
    if options.file:
        return _write(config, runs=runs, force=force, options=options)
    if len(runs) > 1:
        raise ConfigError(
            f"`slipstream view` shows one run, got {', '.join(runs)}; `--file FILE` writes a report that compares them"
        )
    run_dir = find_run(runs[0] if runs else config.run.name, config.run.root)
    serve(_pages(config, run_dir), lambda: viewer_page(run_dir.path), port=options.port)
    return 0


def _write(config: Config, *, runs: Sequence[str], force: bool, options: ViewOptions) -> int:
    """Write the report as a file, with the episodes of options.steps."""
    run_dirs = [find_run(word, config.run.root) for word in runs or [config.run.name]]
    folders = [run_dir.path for run_dir in run_dirs]
    target = Path(options.file)
    given = [folder for folder in folders if target.resolve().is_relative_to(folder.resolve())]
    if inside := given[0] if given else run_of(target):
        raise ConfigError(f"--file {target} is in the directory of the run, {inside}; choose another folder")
    check_writable(target, force=force)
    if options.steps and len(folders) > 1:
        raise ConfigError(f"--steps {options.steps} are of one run, got {', '.join(runs)}; write a file for each")
    with held(target):
        if options.steps:
            text = viewer_page(folders[0], data=_data(_pages(config, run_dirs[0]), options.steps))
        else:
            text = page(report_of(folders))
        try:
            write_whole(target, text)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}; name another by --file") from error
    print(f"report: {target}")
    return 0


def viewer_page(folder: Path, *, data: str = "") -> str:
    """The report of a run with the viewer of its archive, which shows `data`, or else asks the server."""
    script = (Path(__file__).parent / "viewer.js").read_text()
    policy = f"script-src {digest(script)}; " + ("" if data else "connect-src 'self'; ")
    embedded = f'<script type="application/json" id="pages">{data}</script>\n' if data else ""
    body = f'{HEADER}{report_of([folder])}\n<main id="main"></main>\n{embedded}<script>{script}</script>'
    return page(body, policy=policy)


def _pages(config: Config, run_dir: RunDir) -> ArchivePages:
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.config} does not exist; give the directory of a run")
    elsewhere = [f"model.path={config.model.path}"] if config.model.path else []
    return ArchivePages(load_config(str(run_dir.config), elsewhere), run_dir)


def _data(pages: ArchivePages, wanted: str) -> str:
    """Every page of the wanted steps by path, as JSON in which no tag can begin or end. Raises ConfigError."""
    first, last = map(int, wanted.split(":"))
    steps = [step for step in pages.steps if first <= step <= last]
    if not steps:
        raise ConfigError(
            f"--steps {wanted} has no archived step; the archive has {pages.steps[0]} to {pages.steps[-1]}"
        )
    parts, num_chars = [_entry("run", pages.run(steps))], 0
    shown = [f"metrics/{step}" for step in steps[::-1][::STEPS_A_PAGE]]  # as the list of steps asks for them
    for path in (*shown, *(path for step in steps for path in _paths(pages, step))):
        parts.append(_entry(path, pages.page(path)))
        num_chars += len(parts[-1])
        if num_chars > MAX_FILE_CHARS:
            raise ConfigError(f"--steps {wanted} are too much for one file; give fewer")
    return "{" + ",\n".join(parts) + "}"


def _paths(pages: ArchivePages, step: int) -> Iterator[str]:
    yield f"steps/{step}"
    for group in pages.page(f"steps/{step}")["groups"]:
        path = f"steps/{step}/groups/{group['group_id']}"
        yield from (path, *(f"{path}/members/{member['member']}" for member in group["members"]))


def _entry(path: str, value: object) -> str:
    return f"{json.dumps(path)}:{json.dumps(value, allow_nan=False)}".replace("<", "\\u003c")
