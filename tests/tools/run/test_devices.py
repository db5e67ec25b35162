"""The GPUs of learner and actors: who gets which of a list, and what `up` chooses where they share one."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from slipstream.actors.engine.shadow_memory import GIB
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.devices import Split, split_devices
from slipstream.tools.run.sharing import share_gpus
from tests.learner.model.model_configs import CONFIGS
from tests.tools.plan.test_plan import STEP

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


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one GPU of 80 GiB, whose nvidia-smi is returned."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncase $1 in *memory*) echo 81920;; *) echo 0;; esac\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


def chosen(*settings: str) -> Config:
    config = load_config(None, ["actors.count=1", *settings])
    share_gpus(config)
    return config


def real_model(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["SmolLM2-135M-Instruct"] | {"num_hidden_layers": 2}))
    return f"model.path={folder}"


def test_actors_that_share_the_learners_gpu_pull_and_get_the_memory_that_their_episodes_can_use(
    one_gpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = msgspec.structs.replace(STEP, kv_token_bytes=1536)  # test_plan has a measured one
    monkeypatch.setattr("slipstream.tools.run.sharing.measure", lambda config: step)
    actors = chosen(real_model(tmp_path / "model"), "model.dtype=bfloat16", "model.max_tokens=2048").actors
    assert actors.transport == "pull"
    assert actors.kv_cache_bytes == 64 * 2048 * 1536  # episodes, tokens
    said = capsys.readouterr().out
    assert "learner and actors share GPU 0: the actors pull weights (actors.transport=pull)" in said
    assert f"are for keys and values (actors.kv_cache_bytes={actors.kv_cache_bytes})" in said


def test_what_the_user_has_set_is_kept_and_the_tiny_model_needs_no_plan(one_gpu: Path) -> None:
    assert chosen("actors.transport=relay", "actors.gpu_memory_utilization=0.4").actors.transport == "relay"
    assert chosen("actors.kv_cache_bytes=4294967296").actors.kv_cache_bytes == 4 * GIB
    assert chosen().actors.kv_cache_bytes == GIB


def test_nothing_is_chosen_where_nothing_is_shared(one_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible in ("", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        actors = chosen().actors
        assert (actors.transport, actors.kv_cache_bytes) == ("broadcast", 0)


def test_a_gpu_whose_memory_nvidia_smi_does_not_say_is_refused(one_gpu: Path, tmp_path: Path) -> None:
    one_gpu.write_text("#!/bin/sh\ncase $1 in *memory*) echo '[N/A]';; *) echo 0;; esac\n")
    with pytest.raises(ConfigError, match=r"does not say how much memory GPU 0 has .*; set `actors.kv_cache_bytes`"):
        chosen(real_model(tmp_path / "model"))
