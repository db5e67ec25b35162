"""Two columns for people."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text


def two_columns(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """A table where a person looks; plain whole lines where the output goes to a file or a program."""
    console = Console()
    if console.is_terminal:
        console.print(two_columns(title, rows))
        return
    print(title)
    for name, value in rows.items():
        print(f"  {name}: {value}", flush=True)
