"""What a model or an environment wrote reaches a terminal as visible characters only."""

import io
import json

from rich.console import Console

from slipstream.common.process.printable import printable
from slipstream.tools.terminal.output_lines import json_line, printable_lines


def test_what_does_not_print_is_written_out() -> None:
    assert printable("\x1b[2J\r\x00\x7f\x9b") == r"\x1b[2J\r\x00\x7f\x9b"
    assert printable("a\u202eb\u200bc\u2028d\ud800") == r"a\u202eb\u200bc\u2028d\ud800"
    assert printable("naïve 漢字 🙂 ▁▂") == "naïve 漢字 🙂 ▁▂"


def test_lines_stay_lines_and_a_terminal_wraps_none_of_them() -> None:
    text = "a\nb\tc\n\n" + "漢" * 9
    assert printable_lines(text, Console(file=io.StringIO()), indent=4) == ["a", "b\\tc", "", "漢" * 9]
    narrow = Console(file=io.StringIO(), force_terminal=True, width=12)
    assert printable_lines(text, narrow, indent=4) == ["a", "b\\tc", "", "漢漢漢漢", "漢漢漢漢", "漢"]
    assert printable("a\nb") == r"a\nb"


def test_a_line_of_json_is_ascii_and_gives_the_same_text_back() -> None:
    text = "\x1b[2J\x9b\u202e\n漢"
    line = json_line({"text": text})
    assert line.isascii() and line.isprintable() and json.loads(line) == {"text": text}
