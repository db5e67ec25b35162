"""`slipstream top`: watch a run in the terminal, from any machine that can reach its Redis and its directory."""

from rich.console import Console
from rich.live import Live

from slipstream.actors.host.join import run_config
from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.common.process.shutdown import Flag, Shutdown
from slipstream.replay.fleet.fleet import Fleet, UnknownRun
from slipstream.tools.see.run_client import client_of
from slipstream.tools.see.runs import COLUMNS, row_of, trains_alone
from slipstream.tools.see.summary import read_summary, summary_rows
from slipstream.tools.see.view import View, show
from slipstream.tools.terminal.table import print_rows, print_table

REFRESH_S = 1.0


def top(config: Config, *, once: bool) -> int:
    """Show the run until Ctrl-C, or once. Of a finished run, show the summary; wait for one that has not started."""
    run_dir = RunDir(config.run.root, config.run.name)
    if standing(run_dir) is Standing.FINISHED or trains_alone(config):
        return _show_recorded(run_dir)
    console = Console()
    once = once or not console.is_terminal
    shutdown = Shutdown()
    view = _view(config, run_dir) if once else view_once_described(config, run_dir, shutdown.requested)
    if view is None:
        return 0
    if once:
        console.print(view.render(), soft_wrap=not console.is_terminal)
    else:
        with Live(view.render(), console=console, auto_refresh=False) as live:
            while not shutdown.requested.wait(REFRESH_S):
                show(console, lambda: live.update(view.render(), refresh=True))
    return 0


def _show_recorded(run_dir: RunDir) -> int:
    """Raises ConfigError."""
    if summary := read_summary(run_dir):
        print_table(f"Slipstream: {run_dir.path.name} has finished", summary_rows(summary))
    else:
        print_rows(COLUMNS, [row_of(run_dir)[1]])
    return 0


def view_once_described(config: Config, run_dir: RunDir, interrupted: Flag) -> View | None:
    """The view, once the learner has described the run; None after Ctrl-C."""
    logged = False
    while True:
        try:
            return _view(config, run_dir)
        except UnknownRun as error:
            if not logged:
                print(f"waiting for the learner: {error}")
                logged = True
        if interrupted.wait(REFRESH_S):
            return None


def _view(config: Config, run_dir: RunDir) -> View:
    """Raises ConfigError, RedisUnreachable, UnknownRun."""
    client = client_of(config, patience_s=0)
    run = run_config(Fleet(client, config.run.name).run_facts())
    run.run.name = config.run.name
    return View(client, run_dir, run)
