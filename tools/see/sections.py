"""The sections of a report, of one run or of several side by side."""

from collections.abc import Sequence

from slipstream.tools.see import charts, tables
from slipstream.tools.see.answers import answers
from slipstream.tools.see.blocks import Block, Chart, Rows, Section
from slipstream.tools.see.run_files import RunFiles


def sections(runs: Sequence[RunFiles]) -> list[Section]:
    """A column of each table and a line of each chart for each run. What is not recorded is named at the end."""
    found = [
        Section(title="In thirty seconds", blocks=[answers(runs)]),
        Section(title="Is it learning?", blocks=_drawn(charts.success(runs), charts.reward(runs))),
        Section(title="How stale is the data?", blocks=_drawn(charts.lag(runs), charts.sample_size(runs))),
        Section(
            title="Where does the time go?",
            blocks=_drawn(*(charts.step_time(run) for run in runs), charts.episode_time(runs), charts.speed(runs)),
        ),
        Section(
            title="Where are the trajectories?",
            blocks=[*_drawn(charts.accounts(runs), charts.goodput(runs)), *tables.accounts(runs)],
        ),
        Section(title="What does it cost?", blocks=[*_drawn(charts.cost(runs)), tables.cost(runs)]),
        Section(title="What failed, and was survived?", blocks=[tables.faults(runs)]),
        Section(title="Settings", blocks=tables.settings(runs)),
        Section(title="Commands", blocks=[tables.commands(runs)]),
    ]
    missing = [[run.name, sentence] for run in runs for sentence in run.missing]
    if missing:
        found.append(Section(title="What is missing", blocks=[Rows(head=["run", "what"], rows=missing)]))
    return [section for section in found if section.blocks]


def _drawn(*drawn: Chart | None) -> list[Block]:
    return [chart for chart in drawn if chart is not None]
