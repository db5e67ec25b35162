"""Compiled layers compute what the others do, from one set of code for packs of all lengths."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from slipstream.common.config.config import load_config
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.learner import train_on
from slipstream.learner.model import kernel
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from tests.learner.devices import kept_bytes
from tests.learner.even_game import load_player, play
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model

# Dynamo looks at every tensor's gradient, and at those that have none; PyTorch hides that warning where it is no error.
# PyTorch advises against Python 3.13.0, where its guards are slower.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning"),
]

# Of one sequence and of many, as long as a layer is wide (64) and not.
PACKS = [(30, 20, 11), (64,), (40, 40), (7, 6, 5, 4, 3, 2), (9,), (100, 33, 2), (50,) * 5, (24, 4), (128, 64), (13, 13)]


class CountingBackend:
    """Compiles nothing further than to PyTorch's own operations, forward and backward, and counts what it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.further = "aot_eager"

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        self.num_graphs += 1
        return lookup_backend(self.further)(graph, inputs)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    counting = CountingBackend()
    monkeypatch.setattr(kernel, "BACKEND", counting)
    return counting


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def models(folder: Path, ranks: Ranks, *, checkpointed: bool = False, lora_rank: int = 0) -> list[PackedModel]:
    """Compiled, and not; only the layers of the first may be checkpointed."""
    plain = dataclasses.replace(FLOAT32, lora=LoraConfig(rank=lora_rank))
    found = []
    for settings in (dataclasses.replace(plain, compile=True, activation_checkpointing=checkpointed), plain):
        torch.manual_seed(0)  # for the adapters
        found.append(load_model(folder, ranks=ranks, settings=settings))
    return found


def sequences_of(lengths: Sequence[int]) -> list[TokenSequence]:
    return [random_sequence(length, seed=place, prompt=1) for place, length in enumerate(lengths)]


def logprobs_of(model: PackedModel, lengths: Sequence[int]) -> Tensor:
    return model(pack(sequences_of(lengths))).logprobs


def gradients_of(model: PackedModel, logprobs: Tensor) -> dict[str, Tensor]:
    logprobs.sum().backward()
    found = {name: weight.grad.full_tensor() for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad()
    return found


def assert_alike(compiled: PackedModel, eager: PackedModel, lengths: Sequence[int]) -> None:
    found, expected = logprobs_of(compiled, lengths), logprobs_of(eager, lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    found_gradients, expected_gradients = gradients_of(compiled, found), gradients_of(eager, expected)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert (found_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.long
def test_packs_of_all_lengths_get_the_same_logprobs_and_gradients_from_code_made_once(
    tiny: Path, ranks: Ranks, backend: CountingBackend
) -> None:
    """With adapters and checkpointed layers; the window's test has neither. Only what enters a layer is kept."""
    compiled, eager = models(tiny, ranks, checkpointed=True, lora_rank=4)
    num_graphs = []
    for lengths in PACKS:
        assert_alike(compiled, eager, lengths)
        with torch.no_grad():
            torch.testing.assert_close(logprobs_of(compiled, lengths), logprobs_of(eager, lengths), rtol=0, atol=1e-5)
        num_graphs.append(backend.num_graphs)
    assert num_graphs[0] > 0
    assert num_graphs[-1] == num_graphs[0], num_graphs
    packed = pack(sequences_of((200,) * 4))
    assert kept_bytes(compiled, packed) < 0.3 * kept_bytes(eager, packed)


@pytest.mark.long
def test_shared_prefixes_need_no_code_of_their_own(tiny: Path, ranks: Ranks, backend: CountingBackend) -> None:
    compiled, eager = models(tiny, ranks, checkpointed=True)
    for lengths in PACKS[:3]:
        assert_alike(compiled, eager, lengths)
    num_graphs = backend.num_graphs
    for lengths in ((30, 20, 25), (40, 13)):
        siblings = [
            dataclasses.replace(each, tokens=np.where(np.arange(each.num_tokens) < 9, 7, each.tokens))
            for each in sequences_of(lengths)
        ]
        shared, apart = (pack(siblings, share_prefixes=share_prefixes) for share_prefixes in (True, False))
        assert sum(shared.computed_lengths) == sum(lengths) - 9 * (len(lengths) - 1)
        found = gradients_of(compiled, compiled(shared).logprobs)
        expected = gradients_of(eager, eager(apart).logprobs)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    assert backend.num_graphs == num_graphs


def test_layers_of_one_shape_share_their_code(tmp_path: Path, ranks: Ranks, backend: CountingBackend) -> None:
    backend.further = "eager"  # to count, no backward is needed
    num_graphs = []
    for num_layers in (2, 5):
        compiled, _ = models(save_tiny_model(tmp_path / str(num_layers), num_hidden_layers=num_layers), ranks)
        with torch.no_grad():
            logprobs_of(compiled, (9, 7))
        num_graphs.append(backend.num_graphs)
    assert num_graphs[0] == num_graphs[1] > 0, num_graphs


@pytest.mark.long
def test_a_sliding_window_is_compiled_around(tmp_path: Path, ranks: Ranks, backend: CountingBackend) -> None:
    layers = ["sliding_attention", "full_attention"]
    folder = save_tiny_model(tmp_path, use_sliding_window=True, sliding_window=5, layer_types=layers)
    compiled, eager = models(folder, ranks)
    num_graphs = []
    for lengths in PACKS[:4]:
        assert_alike(compiled, eager, lengths)
        num_graphs.append(backend.num_graphs)
    assert num_graphs[-1] == num_graphs[0], num_graphs


@pytest.mark.long
def test_the_learner_compiles_the_policy_and_a_critic_of_its_own(
    tmp_path: Path, tiny: Path, ranks: Ranks, backend: CountingBackend
) -> None:
    overrides = [f"model.path={tiny}", "objective.advantage=gae", "objective.critic=own", "learner.compile=true"]
    learner, player = load_player(load_config(None, overrides), tmp_path, ranks)
    critic = learner.models.critic
    for passes in (lambda: logprobs_of(learner.model, (9, 7)), lambda: critic.module(pack(sequences_of((9, 7))))):
        torch.compiler.reset()
        backend.num_graphs = 0
        with torch.no_grad():  # the step below compiles the rest
            passes()
        assert backend.num_graphs > 0
    metrics = train_on(learner, play(learner, player, num_groups=1), Clock(ranks.device))
    assert not metrics.skipped


@pytest.mark.long
def test_native_code_computes_the_same(tiny: Path, ranks: Ranks) -> None:
    """With the compiler that is trained with: it needs g++, as `make setup` says."""
    compiled, eager = models(tiny, ranks, checkpointed=True)
    for lengths in PACKS[:2]:
        assert_alike(compiled, eager, lengths)


def test_a_missing_cpp_compiler_is_named_first(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    with pytest.raises(ConfigError, match=r"`learner.compile` must be false .*No working C\+\+ compiler.*install"):
        load_model(tmp_path / "none", ranks=ranks, settings=dataclasses.replace(FLOAT32, compile=True))
