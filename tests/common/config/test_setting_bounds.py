import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from slipstream.common.config.config import Config
from slipstream.common.config.setting_bounds import Count, Share, ShareBelow1, check_bounds
from slipstream.common.process.config_error import ConfigError


@dataclasses.dataclass(kw_only=True)
class Section:
    steps: Count = 3  # of the run
    share: Share = 0.5
    below: ShareBelow1 = 0.0
    none: Annotated[int | None, get_args(Count)[1]] = None
    word: Literal["keep", "drop"] = "keep"  # what happens then
    least: float = -math.inf  # of a return


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`a.steps` must be >= 1, got 0; 3 is the default: of the run"),
        ({"share": 1.01}, "`a.share` must be in [0, 1], got 1.01"),
        ({"share": math.nan}, "`a.share` must be finite, got nan"),
        ({"least": math.nan}, "`a.least` must be a number, got nan; -inf is the default: of a return"),
        ({"below": 1.0}, "`a.below` must be in [0, 1), got 1.0"),
        ({"none": 0}, "`a.none` must be >= 1, got 0"),
        ({"word": "kept"}, "`a.word` must be keep or drop, got 'kept'; 'keep' is the default: keep or drop; what"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_with_its_key_and_meaning(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_bounds(Section(**changes), "a.")
    assert message in str(raised.value)


def test_the_ends_of_closed_bounds_are_accepted() -> None:
    for changes in ({"steps": 1}, {"share": 0}, {"share": 1}, {"below": 0}, {"none": 1}, {"word": "drop"}):
        check_bounds(Section(**changes), "a.")


def bounded(section: Any, path: str = "") -> Iterator[tuple[Any, str, str]]:
    """Every section with the name of each field that has bounds."""
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(value := getattr(section, item.name)):
            yield from bounded(value, f"{path}{item.name}.")
        elif get_origin(item.type) in (Annotated, Literal):
            yield section, path, item.name


def test_every_section_checks_the_bounds_of_its_settings() -> None:
    settings = list(bounded(Config()))
    assert len(settings) > 60
    for section, path, name in settings:
        with pytest.raises(ConfigError, match=f"`{path}{name}`"):
            dataclasses.replace(section, **{name: math.inf})
