"""GAIA's quasi-exact match, against hand-made examples."""

import pytest

from slipstream.envhub.research.gaia_score import is_gaia_match


@pytest.mark.parametrize(
    ("answer", "true"),
    [
        ("17", "17"),
        (" 17.0 ", "17"),
        ("$1,200", "1200"),
        ("89706.00", "$89706".removeprefix("$")),
        ("12.5%", "12.5"),
        ("-3", "-3"),
        ("St. Petersburg", "st petersburg"),
        ("Dr Who!", "dr. who"),
        ("the  Seagull", "The Sea Gull"),
        ("a,b;c", "a, b, c"),
        ("Red, $1,5", "red, 1, 5"),
        ("1.0; two words", "1;twowords"),
        ("1,000", "1000"),
        ("3.", "3"),
        ("3 m", "3m"),
    ],
)
def test_these_answers_match(answer: str, true: str) -> None:
    assert is_gaia_match(answer, true)


@pytest.mark.parametrize(
    ("answer", "true"),
    [
        ("17 apples", "17"),
        ("seventeen", "17"),
        ("", "17"),
        ("", "dover"),
        ("17", "18"),
        ("nan", "17"),
        ("no number", "inf"),
        ("dover castle", "dover"),
        ("a, b", "a, b, c"),
        ("b, a", "a, b"),
        ("a b", "a, b"),
        ("a., b", "a, b"),
        ("x, 2", "1, 2"),
        ("1000", "1,000"),  # a list of two, as on the leaderboard
        ("3 m", "3"),
    ],
)
def test_these_answers_do_not_match(answer: str, true: str) -> None:
    assert not is_gaia_match(answer, true)
