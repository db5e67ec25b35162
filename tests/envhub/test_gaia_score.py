"""GAIA's quasi-exact match, against hand-made examples."""

import pytest

from slipstream.envhub.research.gaia_score import is_gaia_match


@pytest.mark.parametrize(
    ("true", "right", "wrong"),
    [
        ("17", ["17", " 17.0 "], ["17 apples", "seventeen", "", "nan", "18"]),
        ("-3", ["-3"], []),
        ("3", ["3."], ["3 m"]),
        ("3m", ["3 m"], []),
        ("12.5", ["12.5%"], []),
        ("1200", ["$1,200"], []),
        ("89706", ["89706.00"], []),
        ("1000", ["1,000"], []),
        ("1,000", [], ["1000"]),  # a list of two, as on the leaderboard
        ("inf", [], ["no number"]),
        ("nan", ["NaN"], ["1", "no number"]),
        ("dover", [], ["", "dover castle"]),
        ("st petersburg", ["St. Petersburg"], []),
        ("dr. who", ["Dr Who!"], []),
        ("The Sea Gull", ["the  Seagull"], []),
        ("a, b, c", ["a,b;c"], ["a, b"]),
        ("a, b", [], ["b, a", "a b", "a., b"]),
        ("1, 2", [], ["x, 2"]),
        ("red, 1, 5", ["Red, $1,5"], []),
        ("1;twowords", ["1.0; two words"], []),
    ],
)
def test_an_answer_matches_or_does_not(true: str, right: list[str], wrong: list[str]) -> None:
    found = [is_gaia_match(answer, true) for answer in (*right, *wrong)]
    assert found == [True] * len(right) + [False] * len(wrong)
