"""Tables of names as text."""

from slipstream.envhub.name_list import name_list


def test_names_are_separated_by_commas_and_may_contain_spaces() -> None:
    assert name_list("red, forest green") == ("red", "forest green")
    assert name_list("\n    red,\n    forest green\n    ") == ("red", "forest green")
