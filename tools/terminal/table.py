"""Tables: drawn in a terminal, plain lines that are not wrapped where the output goes to a file or a program."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.common.process.printable import printable


def cell(text: str) -> Text:
    """Text from another process as a table cell, without markup and without control characters."""
    return Text(printable(text))


def two_columns(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and values, for a terminal."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, cell(value))
    return table


def print_table(title: str, rows: Mapping[str, str]) -> None:
    console = Console()
    if console.is_terminal:
        console.print(two_columns(title, rows))
        return
    print(title)
    for name, value in rows.items():
        print(f"  {name}: {printable(value)}", flush=True)


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under the names of their columns."""
    console = Console()
    cells = [[printable(value) for value in row] for row in rows]
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
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
