"""The log of a process on standard error: printable lines, or JSON where programs read it."""

import json
import logging
import os
import stat
import sys

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(message)s"
FORMAT_VARIABLE = "SLIPSTREAM_LOG"


class PrintableFormatter(logging.Formatter):
    """Escapes characters that are not visible, and indents every line of a record after the first.

    A record may quote an environment, a model or another host. Such text must not control the terminal that shows the
    log, and must not look like a log line of ours.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(map(printable, super().format(record).split("\n")))


class JsonFormatter(logging.Formatter):
    """One record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": record.created,
            "level": record.levelname,
            "process": os.getpid(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the log of this process to standard error: as JSON if that is a pipe, as a container's is, else as text.

    Terminals and the files of `logs/` are read by people. FORMAT_VARIABLE says otherwise.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_for_programs() else PrintableFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    for name in ("httpx", "httpx2"):  # of OpenAI's client: a line for each call of an agent
        logging.getLogger(name).setLevel(logging.WARNING)


def is_for_programs() -> bool:
    """Whether the log is JSON. Raises ConfigError for an unknown format."""
    wanted = os.environ.get(FORMAT_VARIABLE, "")
    if wanted not in ("", "text", "json"):
        raise ConfigError(
            f"{FORMAT_VARIABLE} must be text or json, got {wanted!r}; unset it to log JSON to pipes alone"
        )
    try:
        mode = os.fstat(sys.stderr.fileno()).st_mode
    except (OSError, ValueError):  # it is no file, or closed
        mode = 0
    return wanted == "json" or (not wanted and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)))
