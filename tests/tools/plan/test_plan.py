"""`slipstream plan`: each recipe of conf/, what fits and what does not, and what to change."""

import functools
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from slipstream.actors.engine.shadow_memory import ENGINE_RESERVE_BYTES, GIB
from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.plan.measured_step import MeasuredStep
from slipstream.tools.plan.memory import LEARNER_RESERVE_BYTES, engine_memory, kv_beside_learner, problems
from slipstream.tools.plan.plan import host_rows, plan
from slipstream.tools.plan.plan_options import PlanOptions
from slipstream.tools.run.devices import Split
from tests.learner.model.model_configs import CONFIGS
from tests.tools.plan.test_fake_gpu import DENSE, run_steps, write_step

REPOSITORY = Path(__file__).parents[3]
RECIPES = {
    path.name: model["path"]
    for path in sorted((REPOSITORY / "conf").glob("*.yaml"))
    if "path" in (model := yaml.safe_load(path.read_text()).get("model", {}))
}
STEP = MeasuredStep(
    num_parameters=10 * GIB,
    num_base_parameters=10 * GIB,
    num_kv_heads=8,
    kv_token_bytes=1 << 20,
    num_attending=2,
    num_layers=2,
    attention="flash",
    dtypes={},
    weights_bytes=5 * GIB,
    loading_peak_bytes=6 * GIB,
    loading_host_bytes=40 * GIB,
    trained_bytes=5 * GIB,
    offloaded_bytes=0,
    other_models_bytes=0,
    step_peak_bytes=40 * GIB,
    publish_peak_bytes=20 * GIB,
    published_bytes=20 * GIB,
    waits={},
)
GPU = 80 * GIB
APART = Split(learner=["0"], actors=["1"])
SHARED = Split(learner=["0"], actors=["0"])


def settings(*overrides: str) -> Config:
    return load_config(None, ["model.max_tokens=8192", "learner.micro_batch_tokens=16384", *overrides])


def found(config: Config, step: MeasuredStep = STEP, split: Split | None = APART) -> list[str]:
    return problems(config, step, split, gpu_bytes=GPU)


@pytest.mark.long
def test_every_recipe_is_planned_with_two_layers_of_its_model(tmp_path: Path) -> None:
    """All in one process, and with two layers, for time: each other layer is like the last."""
    arguments = []
    for recipe, path in RECIPES.items():
        folder = tmp_path / recipe
        folder.mkdir()
        shape = CONFIGS[Path(path).name] | {"num_hidden_layers": 2}
        (folder / "config.json").write_text(json.dumps(shape))
        config = load_config(f"conf/{recipe}", [f"model.path={folder}"])
        (folder / "run.yaml").write_text(dump_config(config))
        arguments += [str(folder / "run.yaml"), str(config.learner.ranks)]
    done = run_steps(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [msgspec.json.decode(line, type=MeasuredStep) for line in done.stdout.splitlines()]
    assert len(steps) == len(RECIPES) == 9
    for recipe, step in zip(RECIPES, steps, strict=True):
        config = load_config(f"conf/{recipe}", [])
        bytes_each = 4 if config.model.dtype == "float32" else 2
        assert step.published_bytes == bytes_each * step.num_parameters, recipe
        assert engine_memory(config, step, gpu_bytes=GPU).num_tokens >= config.model.max_tokens, recipe


def test_a_plan_is_printed_with_what_it_is_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(str(write_step(tmp_path / "dense", DENSE, {})), ["actors.count=1"])
    assert plan(config, PlanOptions(gpus=2, gpu="L4")) == 0
    printed = capsys.readouterr().out
    for part in ("peak of a step", "shadow model", "KV cache", "a publish", "split: learner 0; actors 1", "It fits"):
        assert part in printed
    assert "DOES NOT FIT" not in printed


def test_the_tiny_model_needs_no_plan_and_impossible_hosts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(settings(), PlanOptions()) == 0
    assert "a tiny model fits" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="`--gpu` must be one of A100-40, "):
        PlanOptions(gpu="H1")
    folder = settings("model.path=nowhere", "learner.ranks=9")
    with pytest.raises(ConfigError, match=r"`learner.ranks` must be <= "):
        plan(folder, PlanOptions(gpus=8, actor_gpus=8))
    with pytest.raises(ConfigError, match=r"--actor-gpus must be >= actors.count \* actors.tensor_parallel = 4"):
        plan(settings("model.path=nowhere", "actors.count=2", "actors.tensor_parallel=2"), PlanOptions(actor_gpus=3))


def test_what_a_plan_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"`model.path` nowhere is not a Hugging Face model folder: .*; name one, or"):
        plan(settings("model.path=nowhere"), PlanOptions())
    config = load_config(str(write_step(tmp_path / "dense", DENSE, {})), [])
    monkeypatch.setattr("slipstream.tools.plan.plan.STEP_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigError, match=r"the step on a fake GPU for `model.path` .* has taken longer than 0 s; end"):
        plan(config, PlanOptions())
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"a plan needs a C\+\+ compiler, and no-such-compiler is not installed; "):
        plan(config, PlanOptions())


def test_an_engine_has_weights_a_shadow_of_them_a_reserve_and_what_is_left_for_keys_and_values() -> None:
    engine = engine_memory(settings(), STEP, gpu_bytes=GPU)
    assert (engine.weights_bytes, engine.shadow_bytes) == (20 * GIB, 22 * GIB)
    assert engine.kv_bytes == int(0.9 * GPU) - 42 * GIB - ENGINE_RESERVE_BYTES == 27 * GIB
    assert engine.num_tokens == 27 * 1024
    assert engine.taken_bytes == int(0.9 * GPU)
    four = engine_memory(settings("actors.tensor_parallel=4"), STEP, gpu_bytes=GPU)
    assert (four.weights_bytes, four.shadow_bytes, four.kv_token_bytes) == (5 * GIB, 7 * GIB, 1 << 18)
    sixteen = engine_memory(settings("actors.tensor_parallel=16"), STEP, gpu_bytes=GPU)
    assert sixteen.kv_token_bytes == 1 << 17  # each of 8 heads is on two GPUs


def test_an_engine_whose_kv_cache_would_keep_less_than_half_has_no_shadow() -> None:
    engine = engine_memory(settings("actors.gpu_memory_utilization=0.8"), STEP, gpu_bytes=GPU)
    assert (engine.shadow_bytes, engine.kv_bytes, engine.taken_bytes) == (0, 41 * GIB, 64 * GIB)


def test_for_a_shadow_the_longest_episode_counts_as_if_every_layer_attended() -> None:
    given = settings("model.max_tokens=4096")  # 4 GiB in the layers that attend
    for num_layers, shadow in ((2, 22 * GIB), (12, 22 * GIB), (14, 0)):
        engine = engine_memory(given, msgspec.structs.replace(STEP, num_layers=num_layers), gpu_bytes=GPU)
        assert (engine.shadow_bytes, engine.kv_token_bytes) == (shadow, 1 << 20)


def test_beside_a_kv_cache_of_a_given_size_a_shadow_is_counted_if_it_leaves_a_tenth_of_the_gpu() -> None:
    given = settings("actors.kv_cache_bytes=8589934592")
    alone = engine_memory(given, STEP, gpu_bytes=GPU)
    assert (alone.kv_bytes, alone.shadow_bytes, alone.taken_bytes) == (8 * GIB, 22 * GIB, 53 * GIB)
    tight = engine_memory(given, STEP, gpu_bytes=GPU, beside_bytes=19 * GIB)
    assert (tight.shadow_bytes, tight.taken_bytes) == (22 * GIB, 53 * GIB)
    full = engine_memory(given, STEP, gpu_bytes=GPU, beside_bytes=19 * GIB + 1)
    assert (full.kv_bytes, full.shadow_bytes, full.taken_bytes) == (8 * GIB, 0, 31 * GIB)


def test_the_host_has_slots_for_versions_and_a_copy_of_what_is_trained() -> None:
    rows = host_rows(settings("learner.ranks=2"), STEP)
    assert rows["publishing"] == "80.0 GiB"  # 4 slots
    assert rows["a checkpoint that is being written, its ranks"] == "30.0 GiB"
    assert rows["at the peak"] == "110.0 GiB"
    assert host_rows(settings("learner.ranks=4", "learner.hosts=2"), STEP) == rows  # of each of them


def test_what_fits_has_no_problem() -> None:
    assert found(settings()) == []
    assert found(settings(), split=None) == []
    assert found(settings("actors.kv_cache_bytes=8589934592"), split=SHARED) == []  # 44 + 31 of 80


def test_an_engine_beside_the_learner_gets_what_is_left_and_a_shadow_if_an_episode_fits_beside_it() -> None:
    """Learner 44 GiB, weights 20, reserve 3; a token has 1 MiB, a shadow needs 22 GiB and a tenth of the GPU."""
    at = functools.partial(kv_beside_learner, settings(), STEP)
    assert at(gpu_bytes=GPU) == 13 * GIB  # no room for a shadow
    assert at(gpu_bytes=120 * GIB) == (53 - 22 - 12) * GIB
    assert kv_beside_learner(settings("actors.max_episodes=1"), STEP, gpu_bytes=GPU) == 8 * GIB  # no more is needed
    with pytest.raises(ConfigError, match=r"do not fit on one GPU of 74.0 GiB: the learner needs 44.0 GiB.*8.0 GiB"):
        at(gpu_bytes=74 * GIB)


def test_what_does_not_fit_is_named_with_what_to_change() -> None:
    large = msgspec.structs.replace(STEP, step_peak_bytes=GPU - LEARNER_RESERVE_BYTES + 1)
    (problem,) = found(settings(), large)
    assert "a rank of the learner needs 80.0 GiB of 80.0 GiB" in problem
    for advice in ("activation_checkpointing=true", "micro_batch_tokens to 8192", "ranks above 1", "cpu_offload=true"):
        assert advice in problem
    (problem,) = found(settings("learner.micro_batch_tokens=8192", "learner.ranks=2"), large)  # none can be shorter
    assert "divide each sequence over more ranks: learner.context_ranks=2" in problem
    (problem,) = found(settings("actors.kv_cache_bytes=17179869184"), split=SHARED)  # 44 + 39 of 80
    assert "set actors.kv_cache_bytes=13958643712" in problem
    (problem,) = found(settings("actors.kv_cache_bytes=1073741824"))
    assert "memory for 1024 tokens" in problem
    (problem,) = found(settings("actors.kv_cache_bytes=68719476736"))
    assert "an engine needs 87.0 GiB of 80.0 GiB" in problem
    (problem,) = found(settings("actors.tensor_parallel=3"))
    assert "neither divides the model's 8 key-value heads" in problem
