"""Every family that docs/families.json has numbers of is computed so again, by an engine of its own."""

import json
import re
from pathlib import Path

import pytest

from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.families.__main__ import NUMBER, PAGE, TABLE, summary
from slipstream.tools.lab.families.measure import COLUMNS, measure
from slipstream.tools.lab.families.tiny import FAMILIES

MEASURED = json.loads(TABLE.read_text())
ROWS = {family: cells for family, cells in MEASURED["families"].items() if cells["load"] == "yes"}
# In bfloat16 the differences are those of rounding, and vary. For images vLLM needs torchvision, which the lock lacks.
LEFT_OUT = re.compile("bfloat16|with images")
ALIKE = [
    family
    for family, row in ROWS.items()
    if not LEFT_OUT.search(family) and all(NUMBER.fullmatch(row[column]) for column in COLUMNS[1:])
]
IN_CI = {"qwen3", "falcon_h1", "gpt_oss"}  # one of each kind; test_family_engine serves one of experts
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


def test_the_page_says_what_was_measured() -> None:
    assert summary(MEASURED) in PAGE.read_text()
