"""What a model or an environment wrote reaches a terminal as visible characters only."""

import json

from tools.printable import json_line, printable


def test_what_does_not_print_is_written_out() -> None:
    assert printable("\x1b[2J\r\x00\x7f\x9b") == r"\x1b[2J\r\x00\x7f\x9b"
    assert printable("a\u202eb\u200bc\u2028d\ud800") == r"a\u202eb\u200bc\u2028d\ud800"
    assert printable("naïve 漢字 🙂 ▁▂") == "naïve 漢字 🙂 ▁▂"


def test_line_breaks_stay_only_where_they_are_asked_for() -> None:
    assert printable("a\nb") == r"a\nb"
    assert printable("a\nb\tc", lines=True) == "a\nb\\tc"


def test_a_line_of_json_is_ascii_and_gives_the_same_text_back() -> None:
    text = "\x1b[2J\x9b\u202e\n漢"
    line = json_line({"text": text})
    assert line.isascii() and line.isprintable() and json.loads(line) == {"text": text}
