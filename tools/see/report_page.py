"""The page about a run, or the comparison of several, as HTML that needs no other file."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slipstream.common.process.run_dir import RunDir
from slipstream.tools.see import tables
from slipstream.tools.see.curves import escaped, figures
from slipstream.tools.see.report_answers import ANSWERS
from slipstream.tools.see.run_files import RunFiles, read_run

REPORT = "report.html"  # in the directory of the run; of several runs, in run.root
STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src {style}; {more}base-uri 'none'; \
form-action 'none'">
<meta name="viewport" content="width=device-width">
<title>Slipstream</title>
<style>{css}</style>
</head>
<body>
"""


def page(body: str, *, policy: str = "") -> str:
    """A page with our style, which loads and runs nothing but what `policy` allows."""
    return HEAD.format(css=STYLE, style=digest(STYLE), more=policy) + body + "\n</body>\n</html>\n"


def digest(text: str) -> str:
    """The source of a script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def report_of(folders: Sequence[Path]) -> str:
    """The report of the runs in `folders` as HTML, with a column of each table for each run."""
    runs = [read_run(RunDir(folder.parent, folder.name)) for folder in folders]
    names = [run.name for run in runs]
    answered = [[question, *map(answer, runs)] for question, answer in ANSWERS.items()]
    between, others = tables.settings(runs)
    sections = {
        "In thirty seconds": _table(["", *names], answered),
        "Is it learning?": "",
        "How stale is the data?": "",
        "Where does the time go?": _columns(runs, tables.times),
        "Where are the trajectories, and what do they cost?": _columns(runs, tables.accounts),
        "What failed, and was survived?": _columns(runs, tables.faults),
        "Settings that differ between the runs": _table(["", "default", *names], between),
        "Settings that differ from the defaults": _table(["", "default", *names], others),
        "What is missing": _table(["run", "what"], [[run.name, what] for run in runs for what in run.missing]),
    }
    shown = {title: figures(runs, title) + table for title, table in sections.items()}
    body = "\n".join(f"<h2>{title}</h2>\n{text}" for title, text in shown.items() if text)
    return f'<article id="report"><h1>{escaped(", ".join(names))}</h1>\n{body}\n</article>'


def _columns(runs: Sequence[RunFiles], rows_of: Callable[[RunFiles], Mapping[str, str]]) -> str:
    """A table with a column for each run."""
    columns = [rows_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return _table(["", *(run.name for run in runs)], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; empty without a row."""
    if not rows:
        return ""
    top = "".join(f"<th>{escaped(cell)}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'
