"""The soak, shortened: faults every few seconds, and books that balance to the last trajectory."""

import os
from pathlib import Path

import pytest

from slipstream.tools.lab.soak.soak import Soak, rows_of

SECONDS = float(os.environ.get("SLIPSTREAM_SOAK_S", "45"))
MEAN_S = 3.0
MAX_GROWTH = 1.5  # generous: a minute shows only what leaks fast


@pytest.mark.long
def test_random_kills_lose_nothing_count_nothing_twice_and_leave_nothing_behind(tmp_path: Path) -> None:
    report = Soak(tmp_path, mean_s=MEAN_S, num_actors=3, seed=3).run(SECONDS)
    print(report.faults, report.accounts)
    assert report.unasked == []
    assert report.accounts.lost == [] and report.accounts.twice == [] and report.accounts.wrong == []
    assert report.accounts.num_acknowledged > 100 and report.accounts.num_trained > 20
    assert len(report.faults) == 5
    assert report.accounts.ledger.partials_handed_in > 0
    grown = [
        row.name for row in rows_of(report, max_growth=MAX_GROWTH) if row.name.startswith("flat") and not row.holds
    ]
    assert grown == []
