"""Two columns for people."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def two_columns(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def print_table(title: str, rows: Mapping[str, str]) -> None:
    Console().print(two_columns(title, rows))
