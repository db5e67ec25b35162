"""What `slipstream up` chooses where learner and actors share a GPU, with an nvidia-smi of the test."""

import json
import os
from pathlib import Path

import pytest

from slipstream.actors.engine.shadow_memory import GIB
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.sharing import share_gpus
from tests.learner.model.model_configs import CONFIGS


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
    one_gpu: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actors = chosen(real_model(tmp_path / "model"), "model.dtype=bfloat16", "model.max_tokens=2048").actors
    assert actors.transport == "pull"
    assert actors.kv_cache_bytes == 64 * 2048 * 2 * 2 * 3 * 64 * 2  # episodes, tokens, layers, K and V, heads, bfloat16
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
