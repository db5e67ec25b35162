"""Logged text from any source shows on a terminal as lines of text."""

import logging
from pathlib import Path

from slipstream.common.process.log import FORMAT, PrintableFormatter


def logged(message: str, *args: object, error: Exception | None = None) -> str:
    record = logging.LogRecord("actors", logging.WARNING, "file", 1, message, args, None)
    if error is not None:
        record.exc_info = (type(error), error, None)
    return PrintableFormatter(FORMAT).format(record)


def test_what_a_record_quotes_neither_acts_on_the_terminal_nor_looks_like_a_record() -> None:
    first, second = logged("env failed: %s", "\x1b[2Jgone\r\n2026-01-01 00:00:00,000 INFO all is well").split("\n")
    assert first.endswith(r"WARNING env failed: \x1b[2Jgone\r")
    assert second == "  2026-01-01 00:00:00,000 INFO all is well"


def test_an_exception_is_written_out_too() -> None:
    assert logged("it fails", error=ValueError("\x9b31m\u202e")).split("\n")[1:] == [r"  ValueError: \x9b31m\u202e"]


def test_every_process_logs_so() -> None:
    rooms = ("common", "replay", "envhub", "actors", "learner", "tools")
    sources = [path for room in rooms for path in Path(room).rglob("*.py")]
    assert [str(path) for path in sources if "basicConfig" in path.read_text()] == ["common/process/log.py"]
