"""Prices from a user's file or command: what is read, and what is refused with a reason."""

import sys
from pathlib import Path

import pytest

from slipstream.tools.launch.market import Market, Place
from slipstream.tools.launch.prices import MAX_BYTES, BadPrices, parse_prices, read_prices


def test_a_line_is_a_market(tmp_path: Path) -> None:
    path = tmp_path / "prices"
    path.write_text("# of today\nspot eu-west-1a 0.41\n\nspot eu-west-1b/g6.xlarge 3.9e-1 4 # quota\nreserved home 1\n")
    expected = [
        Market(place=Place("spot", "eu-west-1a"), dollars_per_hour=0.41),
        Market(place=Place("spot", "eu-west-1b/g6.xlarge"), dollars_per_hour=0.39, most=4),
        Market(place=Place("reserved", "home"), dollars_per_hour=1.0),
    ]
    assert read_prices(path=str(path), command="") == expected
    assert read_prices(path="", command=f"cat {path}") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are none"),
        ("# none\n", "there are none"),
        ("spot a 0.4", "the last line does not end"),  # it is being written: the price may be 0.41
        ("spot a\n", "line 1: got 'spot a', expected"),
        ("cheap a 0.4\n", "line 1: got 'cheap a 0.4'"),
        ("spot a 0.4 3 x\n", "expected"),
        ("spot a;b 0.4\n", "expected"),
        ("spot a -1\n", r"the price must be in \(0, 100000\] dollars an hour, got '-1'"),
        ("spot a 0\n", "the price"),
        ("spot a nan\n", "the price"),
        ("spot a inf\n", "the price"),
        ("spot a free\n", "the price"),
        ("spot a 0.4 -1\n", "the most hosts"),
        ("spot a 0.4 1.5\n", "the most hosts"),
        ("spot a 0.4\nspot a 0.5\n", "line 2: spot a has a price already"),
        ('{"spot": 0.4}\n', "expected"),
        ("<html>\n", "expected"),
    ],
)
def test_garbage_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(BadPrices, match=said):
        parse_prices(text, source="prices.txt")


def test_a_file_or_a_command_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices"
    with pytest.raises(BadPrices, match="cannot be read: No such file"):
        read_prices(path=str(path), command="")
    path.write_bytes(b"spot a 0.4\n\xff\n")
    with pytest.raises(BadPrices, match="not UTF-8"):
        read_prices(path=str(path), command="")
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(BadPrices, match="more than"):
        read_prices(path=str(path), command="")
    with pytest.raises(BadPrices, match="cannot be read: Is a directory"):
        read_prices(path=str(tmp_path), command="")
    for command, said in (
        (f"{sys.executable} -c 'raise SystemExit(\"no network\")'", "ended with code 1: no network"),
        ("/nonexistent/prices", "failed"),
        ("echo 'unclosed", "failed"),
        ("true", "there are none"),
    ):
        with pytest.raises(BadPrices, match=said):
            read_prices(path="", command=command)
