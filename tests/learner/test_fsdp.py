"""Two ranks do what one does, each with micro-batches of its own or together with the other's."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.common.config.config import load_config
from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import count_loss_tokens, micro_batches, numbered
from slipstream.learner.checkpoint.checkpoint import latest_checkpoint
from slipstream.learner.learner import train_on
from slipstream.learner.model import kernel
from slipstream.learner.model.critic import ValueModel, critic_shards
from slipstream.learner.model.gradient import apply_gradient, backward
from slipstream.learner.model.packed_model import PackedModel, load_kind, load_model
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.model.weight_shards import full_tensors, whole
from slipstream.learner.ranks.ranks import Ranks, context_of
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step import StepBatch, StepSettings, train_step
from tests.learner import even_game
from tests.learner.checkpoint.test_checkpoint import Learner, begun
from tests.learner.even_game import load_player
from tests.learner.model.test_model_families import EXACT, SEEING, save
from tests.several_ranks import SeveralRanks
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model

OPTIM = OptimConfig(lr=1e-3)
# The lengths of each step's sequences: two ranks get shares of unlike size, and in the last step one gets nothing.
STEPS = [(31, 7, 22, 13, 40, 9, 28), (25,)]
# One has layers that carry a state, and frozen ones for images that no rank runs; the last has experts, windows, sinks,
# and fewer heads of keys than there are ranks.
KINDS = ["tied", "untied", "adapters", "hybrid", "experts"]
# A context of both ranks; the untied model is played with in it, below.
TOGETHER = {f"{name}_together": name for name in KINDS if name not in ("hybrid", "untied")}
FAMILIES = {"hybrid": SEEING["qwen3_5"], "experts": EXACT["gpt_oss"]}
COMPILED = {"compiled": "tied", "compiled_hybrid": "hybrid"}
GAMES = {  # what else than weights a rank keeps its shards of
    "own_critic": ["objective.advantage=gae", "objective.critic=own", "objective.critic_warmup_steps=1"],
    "shared_critic": ["objective.advantage=gae", "objective.critic=shared", "objective.critic_warmup_steps=1"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """What this process as one rank, and two others, found, each in a folder of its own."""
    path = tmp_path_factory.mktemp("results")
    for name in KINDS:
        if name in FAMILIES:
            save(FAMILIES[name], path / f"{name}_model")
        else:
            save_tiny_model(path / f"{name}_model", tie=name != "untied")
        train(path / f"{name}_model", path / f"{name}_on_one", ranks=ranks)
    for game in GAMES:
        play(path / "untied_model", path / f"{game}_on_one", game=game, ranks=ranks)
    SeveralRanks(be_one_of_two, path, num_ranks=2).wait()
    return path


def be_one_of_two(ranks: Ranks, folder: str) -> None:
    rank, path = ranks.rank, Path(folder)
    for name in KINDS:
        train(path / f"{name}_model", path / f"{name}_on_two", ranks=ranks)
    for game in GAMES:
        play(path / "untied_model", path / f"{game}_on_two", game=game, ranks=ranks)
    together = dataclasses.replace(ranks, context=context_of(2, 2))
    for name, kind in TOGETHER.items():
        train(path / f"{kind}_model", path / f"{name}_on_two", ranks=together)
    for game in GAMES:
        play(path / "untied_model", path / f"{game}_together_on_two", game=game, ranks=together)
    resume(path / "tied_model", path / "tied_on_one", path / "resumed_together_on_two", ranks=together)
    refuse(path / "hybrid_model", path / f"refusal_{rank}.txt", ranks=together)
    resume(path / "tied_model", path / "tied_on_one", path / "resumed_on_two", ranks=ranks)
    explode(path / "tied_model", path / f"explosion_{rank}.json", ranks=ranks)
    judge(path / "tied_model", path / f"values_{rank}.json", ranks=ranks)


def compile_on_one_of_two(ranks: Ranks, folder: str) -> None:
    kernel.BACKEND = "aot_eager"  # this process's own
    for name, kind in COMPILED.items():
        train(Path(folder) / f"{kind}_model", Path(folder) / f"{name}_on_two", ranks=ranks, compile=True)


def train(model_folder: Path, out: Path, *, ranks: Ranks, compile: bool = False) -> None:
    """Train STEPS, with a checkpoint after the first, and write down all that came of it."""
    torch.manual_seed(0)  # for the adapters
    lora = LoraConfig(rank=4 if model_folder.name == "adapters_model" else 0)
    model = load_model(model_folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, compile=compile, lora=lora))
    learner = begun(model, ranks, OPTIM)
    measured = [one_step(0, learner)]
    with learner.writing(out / "checkpoints", keep=1) as checkpoints:
        learner.begin(checkpoints, 1)
        measured.append(one_step(1, learner))
        checkpoints.wait()
    write_down(model, out, ranks=ranks)
    if ranks.rank == 0:
        (out / "measured.json").write_text(json.dumps([metrics for metrics, _ in measured]))
        for step, (_, gradients) in enumerate(measured):
            save_file(gradients, out / f"gradients_{step}.safetensors")


def resume(model_folder: Path, trained: Path, out: Path, *, ranks: Ranks) -> None:
    """Do the last of STEPS after the checkpoint in `trained`."""
    learner = begun(load_model(model_folder, ranks=ranks, settings=FLOAT32), ranks, OPTIM)
    learner.load(latest_checkpoint(trained / "checkpoints"))
    one_step(1, learner)
    write_down(learner.model, out, ranks=ranks)


def one_step(step: int, learner: Learner) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The step's metrics, and the gradient that the same packs give to the mean log-probability."""
    model, ranks = learner.model, learner.ranks
    drawn = [random_sequence(length, seed=100 * step + length) for length in STEPS[step]]
    sequences = numbered([dataclasses.replace(each, lags=np.arange(each.num_tokens, dtype=np.int32))] for each in drawn)
    place = {"num_ranks": ranks.num_packing, "rank": ranks.packing_rank, "context": ranks.context}
    batches = micro_batches(sequences, max_tokens=50, **place)
    for packed in batches:
        backward(model(packed).logprobs.sum(), ranks=ranks, divisor=count_loss_tokens(sequences))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: parameter.grad.full_tensor() for name, parameter in trained.items()}
    learner.optimizer.zero_grad()
    settings = StepSettings(objective=ObjectiveConfig(), max_lag=20, max_grad_norm=0.5)
    metrics = train_step(learner.models, StepBatch.of(sequences, batches), settings=settings, ranks=ranks)
    of_buckets = {bucket: dataclasses.asdict(tokens) for bucket, tokens in metrics.by_lag.items()}
    by_lag = {f"{bucket} {name}": x for bucket, numbers in of_buckets.items() for name, x in numbers.items()}
    assert by_lag["33_up masked_fraction"] == 1.0 if step == 0 else "33_up fraction" not in by_lag
    names = ("num_micro_batches", "num_computed_tokens", "num_pairs", "values", "by_lag", "evidence", "losses")
    nested = dict.fromkeys(names, 0)
    return dataclasses.asdict(metrics) | nested | dataclasses.asdict(metrics.evidence) | by_lag, gradients


def write_down(model: PackedModel, out: Path, *, ranks: Ranks) -> None:
    """The weights, and the probe that would be published with them."""
    probe = probe_of(model, ranks.device)
    weights = dict(full_tensors(model)) | {"probe": torch.tensor(probe.logprobs)}
    if ranks.rank == 0:
        out.mkdir(exist_ok=True)
        save_file(weights, out / "weights.safetensors")


def play(model_folder: Path, out: Path, *, game: str, ranks: Ranks) -> None:
    """Two steps on what one set of weights has played, with a checkpoint after the first."""
    overrides = [*GAMES[game], "learner.micro_batch_tokens=520", "optim.critic_lr=1e-3", "optim.lr=1e-3"]
    learner, player = load_player(load_config(None, [f"model.path={model_folder}", *overrides]), out, ranks)
    batches = [even_game.play(learner, player, num_groups=groups) for groups in (3, 1)]
    measured = []
    for batch in batches:
        metrics = train_on(learner, batch, Clock(ranks.device))
        values = {} if metrics.values is None else dataclasses.asdict(metrics.values)
        measured.append(values | {"policy_loss": metrics.loss, "policy_grad_norm": metrics.grad_norm})
        if learner.progress.step == 1:
            even_game.save(learner)
    write_down(learner.model, out, ranks=ranks)
    kept = {name: shard.detach().full_tensor() for name, shard in critic_shards(learner.models.critic)}
    if ranks.rank == 0:
        save_file(kept, out / "kept.safetensors")
        (out / "measured.json").write_text(json.dumps(measured))


def explode(model_folder: Path, out: Path, *, ranks: Ranks) -> None:
    """Give one rank a gradient that is not finite, then both a finite one, and write down what each made of it."""
    learner = begun(load_model(model_folder, ranks=ranks, settings=FLOAT32), ranks, OPTIM)
    model = learner.model
    before = {name: tensor.clone() for name, tensor in full_tensors(model)}
    (packed,) = micro_batches([random_sequence(20, seed=ranks.rank)], max_tokens=50, num_ranks=1, rank=0)
    skipped, changed = [], []
    for factor in (float("inf") if ranks.rank == 1 else 1.0, 1.0):
        backward(model(packed).logprobs.sum() * factor, ranks=ranks, divisor=17)
        skipped.append(apply_gradient(learner.optimizer, learner.schedule, max_grad_norm=1.0).skipped)
        changed.append(any(not torch.equal(tensor, before[name]) for name, tensor in full_tensors(model)))
    out.write_text(json.dumps({"skipped": skipped, "changed": changed, "schedule": learner.schedule.last_epoch}))


def refuse(model_folder: Path, out: Path, *, ranks: Ranks) -> None:
    """Write down why a model cannot be trained by these ranks."""
    try:
        load_model(model_folder, ranks=ranks, settings=FLOAT32)
    except ConfigError as error:
        out.write_text(str(error))


def judge(model_folder: Path, out: Path, *, ranks: Ranks) -> None:
    """Write down a bfloat16 critic's values, and what the float32 weights of its head make of the same states."""
    model = load_kind(ValueModel, model_folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype="bfloat16"))
    shard = model.value_head.weight.to_local()
    shard.data.copy_(1 + torch.arange(len(shard)) * 2.0**-12)  # bfloat16 rounds most of them to 1
    weight, states = whole(model.value_head.weight), []
    model.value_head.register_forward_hook(lambda module, args, output: states.append(args[0]))
    (packed,) = micro_batches([random_sequence(20, seed=ranks.rank)], max_tokens=50, num_ranks=1, rank=0)
    values = model(packed)
    out.write_text(json.dumps({"found": values.tolist(), "expected": (states[0].float() @ weight).tolist()}))


@pytest.mark.long
def test_two_ranks_that_compile_equal_one(results: Path) -> None:
    SeveralRanks(compile_on_one_of_two, results, num_ranks=2).wait()
    for name in COMPILED:
        test_two_ranks_equal_one_in_losses_gradients_and_weights(results, name)


@pytest.mark.parametrize("name", [*KINDS, *TOGETHER])
def test_two_ranks_equal_one_in_losses_gradients_and_weights(results: Path, name: str) -> None:
    one, two = results / f"{(COMPILED | TOGETHER).get(name, name)}_on_one", results / f"{name}_on_two"
    for file in ("gradients_0", "gradients_1", "weights"):
        assert_tensors_close(two / f"{file}.safetensors", one / f"{file}.safetensors")
    found, expected = (json.loads((folder / "measured.json").read_text()) for folder in (two, one))
    for found_step, expected_step in zip(found, expected, strict=True):
        ratios, expected_ratios = found_step.pop("trajectory_ratios"), expected_step.pop("trajectory_ratios")
        assert ratios == pytest.approx(expected_ratios, rel=1e-5)
        assert found_step == pytest.approx(expected_step, rel=1e-5)


@pytest.mark.parametrize("way", ["", "_together"])
@pytest.mark.parametrize("game", GAMES)
def test_two_ranks_with_a_critic_equal_one(results: Path, game: str, way: str) -> None:
    one, two = results / f"{game}_on_one", results / f"{game}{way}_on_two"
    for file in ("weights", "kept"):
        assert_tensors_close(two / f"{file}.safetensors", one / f"{file}.safetensors")
    found, expected = (json.loads((folder / "measured.json").read_text()) for folder in (two, one))
    for found_step, expected_step in zip(found, expected, strict=True):
        assert found_step == pytest.approx(expected_step, rel=1e-4, abs=1e-5)


def test_layers_with_a_state_refuse_a_context_on_every_rank(results: Path) -> None:
    for rank in (0, 1):
        assert "`learner.context_ranks` must be 1, got 2" in (results / f"refusal_{rank}.txt").read_text()


def test_a_checkpoint_of_one_rank_resumes_on_two_and_one_of_two_on_one(results: Path, ranks: Ranks) -> None:
    resume(results / "tied_model", results / "tied_on_two", results / "resumed_on_one", ranks=ranks)
    for resumed in ("resumed_on_two", "resumed_together_on_two", "resumed_on_one"):
        expected = results / "tied_on_one" / "weights.safetensors"
        assert_tensors_close(results / resumed / "weights.safetensors", expected)


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(results: Path) -> None:
    for rank in (0, 1):
        found = json.loads((results / f"explosion_{rank}.json").read_text())
        assert found == {"skipped": [True, False], "changed": [False, True], "schedule": 1}


def test_two_ranks_compute_values_in_float32_beside_a_bfloat16_trunk(results: Path) -> None:
    for rank in (0, 1):
        values = json.loads((results / f"values_{rank}.json").read_text())
        assert values["found"] == pytest.approx(values["expected"], rel=1e-5, abs=1e-5)


def assert_tensors_close(found_file: Path, expected_file: Path) -> None:
    """Up to the rounding of float32 sums in another order: 3e-5 was found where a gradient nearly cancels."""
    found, expected = load_file(found_file), load_file(expected_file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= 5e-5 * float(tensor.norm()), f"{found_file} {name}"
