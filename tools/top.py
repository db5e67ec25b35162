"""`slipstream top`: watch a run in the terminal, from any machine that can reach its Redis and its directory."""

from rich.console import Console
from rich.live import Live

from actors.join import run_config
from common.config import Config
from common.run_dir import RunDir
from common.shutdown import Shutdown
from replay.fleet import Fleet
from tools.replay.run_client import clients_of
from tools.runs import Standing, read_summary, standing
from tools.table import print_table
from tools.up import summary_rows
from tools.view import View, show

REFRESH_S = 1.0


def top(config: Config) -> int:
    """Show the run until Ctrl-C, or once where the output is not a terminal. Of a finished run, show the summary."""
    run_dir = RunDir(config.run.root, config.run.name)
    if standing(config) is Standing.FINISHED:
        print_table(f"Slipstream: {config.run.name} has finished", summary_rows(read_summary(run_dir)))
        return 0
    clients = clients_of(config, patience_s=0)
    run = run_config(Fleet(clients[0], config.run.name).run_facts())
    view = View(
        clients,
        run_dir,
        config.run.name,
        num_steps=run.learner.steps,
        max_lag=run.replay.max_lag,
    )
    console = Console()
    if not console.is_terminal:
        console.print(view.render(), soft_wrap=True)
        return 0
    shutdown = Shutdown()
    with Live(view.render(), console=console, auto_refresh=False) as live:
        while not shutdown.requested.wait(REFRESH_S):
            show(console, lambda: live.update(view.render(), refresh=True))
    return 0
