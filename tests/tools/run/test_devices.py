"""The split of a host's GPUs between learner and actors, from a list of GPUs."""

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.devices import Split, split_devices

EIGHT = [str(number) for number in range(8)]


def split(settings: list[str], visible: list[str]) -> Split:
    return split_devices(load_config(None, settings), visible)


OF_BOTH = ["learner.devices=[7]", "actors.devices=[6]", "actors.count=1"]
SPLITS: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "a CPU": ([], [], [], []),
    "the first for the learner": (["learner.ranks=4"], EIGHT, EIGHT[:4], EIGHT[4:]),
    "one for each": (["actors.count=1"], ["0", "1"], ["0"], ["1"]),
    "the actors' are named": (["actors.devices=[0,1]", "learner.ranks=2"], EIGHT, ["2", "3"], ["0", "1"]),
    "the learner's is named": (["learner.devices=[5]", "actors.count=7"], EIGHT, ["5"], [*EIGHT[:5], "6", "7"]),
    "both are named": (OF_BOTH, EIGHT, ["7"], ["6"]),
    "both are named, and none is found": (OF_BOTH, [], ["7"], ["6"]),
    "there is only one": (["actors.count=1"], ["0"], ["0"], ["0"]),
}


@pytest.mark.parametrize("case", SPLITS)
def test_the_learner_gets_the_first_gpus_and_the_actors_the_others_unless_they_are_named(case: str) -> None:
    settings, visible, learner, actors = SPLITS[case]
    assert split(settings, visible) == Split(learner=learner, actors=actors)


def test_a_split_says_who_has_which_gpus_and_which_are_shared() -> None:
    said = [str(split(["actors.count=1"], gpus)) for gpus in ([], ["0", "GPU-5d3f"])]
    assert said == ["none", "learner 0; actors GPU-5d3f"]
    assert split(["actors.count=1", "learner.devices=[3]", "actors.devices=[3]"], EIGHT).shared == ["3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["learner.ranks=9"], "`learner.ranks` must be <= 8, the GPUs for the learner"),
        (["learner.ranks=7", "actors.count=2"], r"`actors.count` must be <= 1 for the GPUs of the actors \(7\), got 2"),
        (["actors.tensor_parallel=4", "actors.count=2"], "must be <= 1 .* got 2, each with actors.tensor_parallel=4"),
        (["learner.devices=[0]", "learner.ranks=2"], "`learner.ranks` must be <= 1, the number of learner.devices"),
        (["actors.devices=[0,3]", "actors.count=3"], "`actors.count` must be <= 2, the number of actors.devices"),
        (["actors.devices=[0,3]", "actors.count=2", "actors.tensor_parallel=2"], "must be <= 1, the number of actors"),
        *(
            ([f"actors.gpu_memory_utilization={share}"], r"`actors.gpu_memory_utilization` must be in \(0, 1\]")
            for share in (0, -0.5, 1.5)
        ),
    ],
)
def test_too_few_gpus_and_an_impossible_share_are_refused_with_what_to_do(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(settings, EIGHT)
