"""`slipstream report RUN [RUN ...]`: a page about a run, or a comparison of several, from their directories alone."""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir, write_whole
from slipstream.tools.see.blocks import Chart, html, markdown
from slipstream.tools.see.report_options import ReportOptions
from slipstream.tools.see.run_files import read_run
from slipstream.tools.see.runs import find_run
from slipstream.tools.see.sections import sections

FOLDER = "report"  # in the run's directory; of several runs, in run.root
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; }
tr + tr td { border-top: 1px solid #eee; } td:first-child { color: #555; min-width: 9rem; }
.wide { overflow-x: auto; }
figure { margin: 1rem 0; } figcaption { color: #555; } svg { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; }
"""


def report(config: Config, *, runs: Sequence[str], options: ReportOptions) -> int:
    """Write the report of `runs`, or of run.name, and print where it is; return 0. Raises ConfigError."""
    folders = [find_run(word, config.run.root).path for word in runs or [config.run.name]]
    target = Path(options.to or (folders[0] if len(folders) == 1 else Path(config.run.root)) / FOLDER)
    try:
        page = write_report(folders, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; give another folder by --to") from error
    print(f"report: {page}")
    return 0


def write_report(folders: Sequence[Path], target: Path) -> Path:
    """Write report.html, report.md and the charts of the runs in `folders` into `target`; return the HTML file."""
    runs = [read_run(RunDir(folder.parent, folder.name)) for folder in folders]
    title, found = f"Slipstream: {', '.join(run.name for run in runs)}", sections(runs)
    target.mkdir(parents=True, exist_ok=True)
    for block in (block for section in found for block in section.blocks):
        if isinstance(block, Chart):
            write_whole(target / f"{block.name}.svg", block.svg)
    write_whole(target / "report.md", markdown(title, found))
    page = target / "report.html"
    write_whole(page, _page(title, html(found)))
    return page


def _page(title: str, body: str) -> str:
    """A page that needs no other file, and whose policy refuses every script."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"{body}</body></html>\n"
    )
