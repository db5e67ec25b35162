"""The split of a host's GPUs between learner and actors, from a list of GPUs."""

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.devices import Split, split_devices

EIGHT = [str(number) for number in range(8)]


def split(settings: list[str], visible: list[str]) -> Split:
    return split_devices(load_config(None, settings), visible)


def test_a_cpu_has_nothing_to_split() -> None:
    assert split([], []) == Split(learner=[], actors=[])
    assert str(split([], [])) == "none"


def test_the_learner_gets_the_first_gpus_and_the_actors_the_others() -> None:
    assert split(["learner.ranks=4"], EIGHT) == Split(learner=EIGHT[:4], actors=EIGHT[4:])
    assert split(["actors.count=1"], ["0", "1"]) == Split(learner=["0"], actors=["1"])
    assert str(split(["actors.count=1"], ["0", "GPU-5d3f"])) == "learner 0; actors GPU-5d3f"


def test_what_one_side_names_is_kept_and_the_other_side_gets_the_rest() -> None:
    assert split(["actors.devices=[0,1]", "learner.ranks=2"], EIGHT) == Split(learner=["2", "3"], actors=["0", "1"])
    assert split(["learner.devices=[5]", "actors.count=7"], EIGHT).actors == ["0", "1", "2", "3", "4", "6", "7"]
    both = split(["learner.devices=[7]", "actors.devices=[6]", "actors.count=1"], EIGHT)
    assert both == Split(learner=["7"], actors=["6"])
    # What is named counts, also where no GPU was found.
    assert split(["learner.devices=[7]", "actors.devices=[6]", "actors.count=1"], []) == both


def test_learner_and_one_actor_share_a_gpu() -> None:
    assert split(["actors.count=1"], ["0"]) == Split(learner=["0"], actors=["0"])
    assert split(["actors.count=1", "learner.devices=[3]", "actors.devices=[3]"], EIGHT).shared == ["3"]


@pytest.mark.parametrize(
    ("settings", "visible", "message"),
    [
        (["learner.ranks=9"], EIGHT, "`learner.ranks` must be <= 8, the GPUs for the learner"),
        (
            ["learner.ranks=7", "actors.count=2"],
            EIGHT,
            r"`actors.count` must be <= 1 for the GPUs of the actors \(7\), got 2",
        ),
        (
            ["actors.tensor_parallel=4", "actors.count=2"],
            EIGHT,
            "`actors.count` must be <= 1 .* got 2, each with actors.tensor_parallel=4",
        ),
    ],
)
def test_too_few_gpus_are_refused_with_what_to_do(settings: list[str], visible: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(settings, visible)


def test_settings_without_gpus_for_every_rank_or_with_an_impossible_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`learner.ranks` must be <= 1, the number of learner.devices"):
        load_config(None, ["learner.devices=[0]", "learner.ranks=2"])
    for share in (0, -0.5, 1.5):
        with pytest.raises(ConfigError, match=r"`actors.gpu_memory_utilization` must be in \(0, 1\]"):
            load_config(None, [f"actors.gpu_memory_utilization={share}"])
