"""Tables for people: drawn in a terminal, plain whole lines where the output goes to a file or a program."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.printable import printable


def two_columns(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    return table


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Names and values."""
    console = Console()
    if console.is_terminal:
        console.print(two_columns(title, rows))
        return
    print(title)
    for name, value in rows.items():
        print(f"  {name}: {printable(value)}", flush=True)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their columns' names."""
    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    if console.is_terminal:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="cyan")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
