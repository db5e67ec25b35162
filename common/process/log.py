"""The log of a process on standard error, in printable lines."""

import logging
import sys

from slipstream.common.process.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class PrintableFormatter(logging.Formatter):
    """Escapes characters that are not visible, and indents every line of a record after the first.

    A record may quote an environment, a model or another host. Such text must not control the terminal that shows the
    log, and must not look like a log line of ours.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(map(printable, super().format(record).split("\n")))


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    for name in ("httpx", "httpx2"):  # of OpenAI's client: a line for each call of an agent
        logging.getLogger(name).setLevel(logging.WARNING)
