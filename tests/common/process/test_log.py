"""Logged text from any source shows on a terminal as lines of text."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import FORMAT, FORMAT_VARIABLE, PrintableFormatter, is_for_programs


def logged(message: str, *args: object, error: Exception | None = None) -> str:
    record = logging.LogRecord("actors", logging.WARNING, "file", 1, message, args, None)
    if error is not None:
        record.exc_info = (type(error), error, None)
    return PrintableFormatter(FORMAT).format(record)


def test_what_a_record_quotes_neither_acts_on_the_terminal_nor_looks_like_a_record() -> None:
    text = logged("env failed: %s", "\x1b[2Jgone\r\n2026-01-01 00:00:00,000 INFO all is well")
    first, second = text.split("\n")
    assert first.endswith(r"WARNING env failed: \x1b[2Jgone\r")
    assert second == "  2026-01-01 00:00:00,000 INFO all is well"


def test_an_exception_is_written_out_too() -> None:
    text = logged("it fails", error=ValueError("\x9b31m\u202e"))
    assert text.split("\n")[1:] == [r"  ValueError: \x9b31m\u202e"]


def test_every_process_logs_so() -> None:
    rooms = ("common", "replay", "envhub", "actors", "learner", "tools")
    sources = [path for room in rooms for path in Path(room).rglob("*.py")]
    assert [str(path) for path in sources if "basicConfig" in path.read_text()] == ["common/process/log.py"]


LOGS = """
import logging
from slipstream.common.process.log import log_to_stderr
log_to_stderr()
try:
    raise ValueError("\\x1b[2J")
except ValueError:
    logging.getLogger("a").exception("env failed: %s", "two\\nlines")
"""


def stderr_of(*, to: int, **environment: str) -> str:
    command = [sys.executable, "-c", LOGS]
    inherited = {name: value for name, value in os.environ.items() if name != FORMAT_VARIABLE}
    done = subprocess.run(command, stderr=to, text=True, timeout=60, env=inherited | environment)
    assert done.returncode == 0
    return done.stderr or ""


def test_a_pipe_gets_one_line_of_json_for_each_record() -> None:
    (line,) = stderr_of(to=subprocess.PIPE).splitlines()
    record = json.loads(line)
    assert (record["level"], record["message"]) == ("ERROR", "env failed: two\nlines")
    assert record["error"].endswith("ValueError: \x1b[2J") and "\x1b" not in line


def test_a_file_gets_text_and_the_variable_says_otherwise(tmp_path: Path) -> None:
    for wanted, begins in (("", "2"), ("json", "{")):
        with (tmp_path / "log").open("w") as file:
            stderr_of(to=file.fileno(), **({FORMAT_VARIABLE: wanted} if wanted else {}))
        assert (tmp_path / "log").read_text().startswith(begins)
    assert "ERROR env failed: two\n" in stderr_of(to=subprocess.PIPE, **{FORMAT_VARIABLE: "text"})


def test_an_unknown_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "xml")
    with pytest.raises(ConfigError, match="SLIPSTREAM_LOG must be text or json, got 'xml'"):
        is_for_programs()
