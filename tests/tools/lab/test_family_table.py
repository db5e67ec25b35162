"""Every family that the table of docs/models.md says to be computed alike is so, by an engine of its own."""

import re
from pathlib import Path

import pytest

from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.families.__main__ import BEGIN, END, PAGE
from slipstream.tools.lab.families.measure import COLUMNS, measure
from slipstream.tools.lab.families.tiny import FAMILIES

NUMBER = re.compile(r"\de[-+]\d\d")
ROWS = {
    cells[0]: dict(zip(COLUMNS, cells[1:], strict=True))
    for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    if len(cells := line.strip("| ").split(" | ")) == 1 + len(COLUMNS) and cells[1] == "yes"
}
# In bfloat16 the differences are those of rounding, and vary. For images vLLM needs torchvision, which the lock lacks.
LEFT_OUT = re.compile("bfloat16|with images")
ALIKE = [
    family
    for family, row in ROWS.items()
    if not LEFT_OUT.search(family) and all(NUMBER.fullmatch(row[column]) for column in COLUMNS[1:])
]
IN_CI = {"qwen3", "qwen3_moe", "falcon_h1", "gpt_oss"}  # one of each kind
EACH = [pytest.param(family, marks=[] if family in IN_CI else pytest.mark.long) for family in ALIKE]


@pytest.mark.parametrize("family", EACH)
def test_a_family_is_computed_as_the_table_says(family: str, tmp_path: Path, ranks: Ranks) -> None:
    cells = measure(FAMILIES[family], tmp_path, ranks=ranks)
    assert cells.pop("load") == "yes"
    for column, cell in cells.items():
        assert float(cell) < 1e-5 + 10 * float(ROWS[family][column]), (column, cells)


def test_the_table_has_rows_of_dense_models_experts_states_and_sinks() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "mixtral", "falcon_h1", "gpt_oss"} <= set(ALIKE)
    assert ROWS.keys() <= FAMILIES.keys()
