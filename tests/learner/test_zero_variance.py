"""Groups in which nothing has an advantage: dropped and replaced, or trained like the others."""

from pathlib import Path

import numpy as np
import pytest

from slipstream.common.config.config import load_config
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from tests.learner.credit.test_token_advantages import group_of, two_turns

KEEPS = "replay.drop_zero_variance=false"
PRESETS = sorted(Path("conf/objective").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_group_that_teaches_nothing_has_no_advantage_beside_others(preset: Path) -> None:
    """Every preset accepts the option; those that compare no siblings train such groups whatever it says."""
    replay = ["replay.trees=random:2"] if preset.stem == "tree" else []
    objective = load_config(None, [KEEPS, *replay], presets=[str(preset)]).objective
    equal = group_of(two_turns(0.0, 0.3), two_turns(0.0, 0.1 + 0.2))
    other = group_of(two_turns(0.0, 1.0), two_turns(0.0, 0.0))
    assert teaches(equal, objective=objective) != objective.compares_siblings
    if not objective.compares_siblings:
        return
    alone = sequences_with_advantages([other], objective=objective)
    beside = sequences_with_advantages([equal, other], objective=objective)
    for sequence in beside[:2]:
        np.testing.assert_allclose(sequence.advantages, 0.0, atol=1e-6)
    for sequence, same in zip(beside[2:], alone, strict=True):
        np.testing.assert_allclose(sequence.advantages, same.advantages, atol=1e-6)


def test_dapo_drops_such_groups_whatever_the_file_before_it_says() -> None:
    assert not load_config("conf/quickstart.yaml", []).replay.drop_zero_variance
    assert load_config("conf/quickstart.yaml", [], presets=["conf/objective/dapo.yaml"]).replay.drop_zero_variance
