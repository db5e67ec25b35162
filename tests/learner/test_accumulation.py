"""However a batch is cut into micro-batches and dealt to ranks, a step comes to the same, to rounding.

Every way of cutting is compared with one rank that takes the whole batch in one pack. This process is the one rank; two
and three others are made once each, and leave what they found.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.learner.batch.pack import Packed, TokenSequence, micro_batches, numbered, pack
from slipstream.learner.model.context_attention import attention
from slipstream.learner.model.kernel import PACKED_ATTENTION
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks, context_of
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from tests.several_ranks import SeveralRanks
from tests.tools.run.tiny_model import FLOAT32, VOCAB_SIZE, random_sequence, save_tiny_model

# The lengths of each step's sequences. In the last step of three ranks two have nothing to do.
STEPS = [(31, 7, 22, 13, 40), (25,)]
# With at most so many tokens; 0 is special. The last computes the prefixes that sequences share once.
WAYS = {"one sequence at a time": 0, "medium packs": 45, "one pack": 1000, "shared prefixes": 60}
TOGETHER = ("medium packs", "shared prefixes")  # ways in which two ranks also compute each pack together
NORMALISATIONS = [("float32", "tokens"), ("float64", "tokens"), ("float64", "sequences"), ("float64", "constant")]
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
# Float64 shows more; float32 has the model that is trained with.
CASES = [
    (way, normalisation, dtype)
    for way in WAYS
    for dtype, normalisation in NORMALISATIONS
    if dtype == "float64" or way in ("one pack", *TOGETHER)
]
# A normalisation weighs the whole batch before it is cut: on several ranks each way has the one whose weights differ.
HARDEST = [case for case in CASES if "sequences" in case or "float32" in case]
TOGETHER_ON_2 = [(f"{way}, together", normalisation, dtype) for way, normalisation, dtype in HARDEST if way in TOGETHER]
CASES_ON = {1: CASES, 2: HARDEST + TOGETHER_ON_2, 3: [case for case in HARDEST if "medium packs" in case]}
LR = 1e-3
pytestmark = pytest.mark.timeout(1800)  # hundreds of collectives, each of which waits for the slowest rank
# Nothing is left out, however far the random log-probabilities are from the model's.
UNBOUNDED = {"surrogate": "cispo", "correction": "none", "max_negative_kl": 0, "guard": False}
OBJECTIVE = ObjectiveConfig(**UNBOUNDED, normalisation_tokens=16)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """What one, two and three ranks found, each case in a folder of its own."""
    path = tmp_path_factory.mktemp("results")
    save_tiny_model(path / "float32")
    save_model_without_float32(path / "float64")
    train_all(ranks, str(path))
    for num_ranks in (2, 3):
        SeveralRanks(train_all, path, num_ranks=num_ranks).wait()
    return path


def train_all(ranks: Ranks, path: str) -> None:
    for way, normalisation, dtype in CASES_ON[ranks.num_ranks]:
        train(Path(path), way, normalisation, dtype, ranks=ranks)


def batch_of(step: int, lengths: tuple[int, ...]) -> list[TokenSequence]:
    """Every two sequences are branches of one trajectory; they come into packs and to ranks of any sort.

    All begin with the same 5 tokens, and the branches of a trajectory with the same 12, most of which are trained.
    """
    trunk, sequences = random_sequence(12, seed=step).tokens, []
    for number, length in enumerate(lengths):
        drawn = random_sequence(length, seed=100 * step + length)
        branch = np.concatenate([trunk[:5], (trunk[5:] + number // 2) % VOCAB_SIZE, drawn.tokens[12:]])
        sequences.append(dataclasses.replace(drawn, tokens=branch[:length]))
    return numbered(sequences[start : start + 2] for start in range(0, len(sequences), 2))


def folder_of(path: Path, num_ranks: int, way: str, normalisation: str, dtype: str) -> Path:
    return path / f"{num_ranks} {way} {normalisation} {dtype}"


def train(path: Path, way: str, normalisation: str, dtype: str, *, ranks: Ranks) -> None:
    """Train STEPS, and write down every loss, every gradient, and the weights in the end."""
    out = folder_of(path, ranks.num_ranks, way, normalisation, dtype)
    if way.endswith(", together"):
        ranks = dataclasses.replace(ranks, context=context_of(ranks.num_ranks, ranks.num_ranks))
    model = load(path / dtype, ranks=ranks)
    optimizer = make_optimizer(model, config=OptimConfig(lr=LR))
    schedule = make_schedule(optimizer, config=OptimConfig(lr=LR), num_steps=len(STEPS))
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.full_tensor() for name, p in model.causal_lm.named_parameters()})
    )
    models, measured = StepModels(policy=model, optimizer=optimizer, schedule=schedule), []
    objective = dataclasses.replace(OBJECTIVE, normalisation=normalisation)
    settings = StepSettings(objective=objective, max_grad_norm=math.inf)
    for step, lengths in enumerate(STEPS):
        sequences = batch_of(step, lengths)
        batch = StepBatch.of(sequences, cut(sequences, way, ranks=ranks))
        metrics = train_step(models, batch, settings=settings, ranks=ranks)
        assert not metrics.skipped
        measured.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm})
    weights = dict(full_tensors(model))
    if ranks.rank == 0:
        out.mkdir()
        (out / "measured.json").write_text(json.dumps(measured))
        for step, of_step in enumerate(gradients):
            save_file(of_step, out / f"gradients_{step}.safetensors")
        save_file(weights, out / "weights.safetensors")


def cut(sequences: list[TokenSequence], way: str, *, ranks: Ranks) -> list[Packed]:
    """This rank's micro-batches."""
    num_ranks, rank = ranks.num_packing, ranks.packing_rank
    way = way.removesuffix(", together")
    if max_tokens := WAYS[way]:
        share_prefixes = way == "shared prefixes"
        sizes = {"max_tokens": max_tokens, "share_prefixes": share_prefixes, "num_ranks": num_ranks}
        shares = [micro_batches(sequences, rank=each, context=ranks.context, **sizes) for each in range(num_ranks)]
        if share_prefixes and len(sequences) == len(STEPS[0]):
            assert any(packed.prefixes for share in shares for packed in share)
        return shares[rank]
    num_rounds = -(-len(sequences) // num_ranks)
    shares = [sequences[number : number + 1] for number in range(num_rounds * num_ranks)]
    return [pack(share) for share in shares[rank::num_ranks]]


def save_model_without_float32(folder: Path) -> None:
    """A model that is in float64 what its weights are: RMS norms of transformers go by way of float32."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    without = dict.fromkeys(("sliding_window", "bos_token_id", "eos_token_id"))
    # Nothing depends on a key's bias: its gradient is rounding alone.
    config = Starcoder2Config(**sizes, **heads, **without, initializer_range=0.2, use_bias=False)
    Starcoder2ForCausalLM(config).save_pretrained(folder)


def load(folder: Path, *, ranks: Ranks) -> PackedModel:
    """The model in `folder`, in the dtype that the folder is named for."""
    if folder.name == "float32":
        return load_model(folder, ranks=ranks, settings=FLOAT32)
    AttentionInterface.register(PACKED_ATTENTION, attention)
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=PACKED_ATTENTION)
    model = PackedModel(causal_lm, folder=folder, settings=FLOAT32).eval()
    model.shares_prefixes = True
    for module in [*causal_lm.model.layers, model]:
        fully_shard(module, mesh=ranks.mesh)
    return model


@pytest.mark.parametrize(
    ("num_ranks", "way", "normalisation", "dtype"),
    [(num_ranks, *case) for num_ranks, cases in CASES_ON.items() for case in cases],
)
def test_losses_gradients_and_weights_do_not_depend_on_how_a_batch_is_cut(
    results: Path, num_ranks: int, way: str, normalisation: str, dtype: str
) -> None:
    found = folder_of(results, num_ranks, way, normalisation, dtype)
    expected = folder_of(results, 1, "one pack", normalisation, dtype)
    tolerance = TOLERANCE[dtype]
    steps = (json.loads((folder / "measured.json").read_text()) for folder in (found, expected))
    for found_step, expected_step in zip(*steps, strict=True):
        assert found_step == pytest.approx(expected_step, rel=tolerance, abs=0)
    for file in (*(f"gradients_{step}" for step in range(len(STEPS))), "weights"):
        assert distance(found / f"{file}.safetensors", expected / f"{file}.safetensors") < tolerance, file


@pytest.mark.parametrize("normalisation", ["tokens", "sequences", "constant"])
def test_what_is_compared_has_been_trained(results: Path, normalisation: str) -> None:
    trained = load_file(folder_of(results, 1, "one pack", normalisation, "float64") / "weights.safetensors")
    for name, tensor in load_file(results / "float64" / "model.safetensors").items():
        assert trained[name].dtype == torch.float64
        assert float((trained[name] - tensor).abs().max()) > LR


def distance(found_file: Path, expected_file: Path) -> float:
    """The largest of all tensors: the norm of the difference, relative to the norm."""
    found, expected = load_file(found_file), load_file(expected_file)
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())
