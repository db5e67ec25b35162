"""A step whose shared prefixes are computed once is the step of separate sequences: losses, gradients, measurements."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from slipstream.common.config.config import load_config
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import Packed, TokenSequence, pack
from slipstream.learner.learner import Learner, train_on
from slipstream.learner.model.packed_model import load_kind, load_model
from slipstream.learner.model.reward_model import RewardModel
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from tests.learner.devices import gradients, on_cpu, relative_error
from tests.learner.even_game import load_player, play
from tests.tools.run.tiny_model import FLOAT32, random_sequence, save_tiny_model

GAE = ["objective.advantage=gae", "optim.critic_lr=1e-2"]
# Everything that a pack goes through beside the policy's forward and backward pass.
OBJECTIVES = {
    "siblings": [],
    "own critic": [*GAE, "objective.critic=own"],
    "shared critic": [*GAE, "objective.critic=shared"],
    "reference in the loss": ["objective.kl_coefficient=0.1"],
    "reference in the reward": ["objective.kl_coefficient=0.1", "objective.kl_place=reward"],
    "v-trace": [*GAE, "objective.advantage=vtrace", "objective.critic=own", "objective.correction=none"],
    "sequence ratios": ["objective.surrogate=gspo", "objective.normalisation=sequences", "objective.dual_clip=3"],
    "entropy": ["objective.entropy_bonus=0.01"],
    "adapters": ["model.lora.rank=4"],
    "checkpointed": ["learner.activation_checkpointing=true"],
    "small packs": ["learner.micro_batch_tokens=40"],
    "weights on the host": ["learner.cpu_offload=true"],
}
COMPILED = {  # on a GPU; `test_compiler` has the CPU's
    "compiled": ["learner.compile=true", *GAE, "objective.critic=own", "objective.kl_coefficient=0.1"],
    "compiled, adapters on the host": ["learner.compile=true", "learner.cpu_offload=true", "model.lora.rank=4"],
}
NUM_STEPS = 2  # in the last, critic, reference and adapters differ from what they began as


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_with_shared_prefixes_has_the_loss_and_the_gradient_of_separate_sequences(
    name: str, tiny: Path, tmp_path: Path, ranks: Ranks, device: torch.device
) -> None:
    """On a GPU, where no kernel shares keys in float32, a step of separate ones has those of the CPU."""
    on_gpu = device.type == "cuda"
    num_computed, num_apart = compare_steps(OBJECTIVES[name], tiny, tmp_path, ranks, max_error=1e-3 if on_gpu else 1e-5)
    assert num_computed == num_apart if on_gpu else num_computed < 0.8 * num_apart


@pytest.mark.parametrize("name", COMPILED)
def test_a_step_of_compiled_layers_on_a_gpu_has_the_loss_and_the_gradient_of_the_cpu(
    name: str, tiny: Path, tmp_path: Path, ranks: Ranks, gpu: torch.device
) -> None:
    compare_steps(COMPILED[name], tiny, tmp_path, ranks, max_error=1e-3)


def compare_steps(
    objective: list[str], tiny: Path, tmp_path: Path, ranks: Ranks, *, max_error: float
) -> tuple[int, int]:
    """Compare a step on the device, with shared prefixes if it can, with a plain one of separate sequences on the CPU.

    Return how many tokens each computed.
    """
    settings = [f"model.path={tiny}", "model.max_tokens=32", "sampling.max_turn_tokens=8", "optim.lr=1e-3"]
    settings += ["model.dtype=float32", "learner.micro_batch_tokens=512", *objective]
    plainly = ["learner.compile=false", "learner.cpu_offload=false"]
    learner, _ = load_player(load_config(None, settings), tmp_path / "shared", ranks)
    plain, player = load_player(load_config(None, [*settings, *plainly]), tmp_path / "apart", on_cpu(ranks))
    can_share = learner.model.shares_prefixes
    for step in range(NUM_STEPS):
        learner.model.shares_prefixes = can_share and step == NUM_STEPS - 1
        plain.model.shares_prefixes = False
        batch = play(plain, player)
        (shared, gradients), (apart, expected) = step_on(learner, batch), step_on(plain, batch)
    assert not shared.skipped and shared.grad_norm > 0
    for field in ("loss", "entropy", "reference_kl", "ratio_mean", "ratio_max", "grad_norm", "effective_sample_size"):
        assert getattr(shared, field) == pytest.approx(getattr(apart, field), rel=max_error, abs=max_error / 10), field
    assert gradients.keys() == expected.keys()
    for weight, gradient in expected.items():
        assert float((gradients[weight] - gradient).norm()) <= max_error * float(gradient.norm()), weight
    return shared.num_computed_tokens, apart.num_computed_tokens


def step_on(learner: Learner, batch: Batch) -> tuple[StepMetrics, dict[str, Tensor]]:
    """The metrics of a step, and the gradients of policy and critic."""
    gradients: dict[str, Tensor] = {}
    optimizers = {"policy": learner.models.optimizer}
    if learner.models.critic is not None:
        optimizers["critic"] = learner.models.critic.optimizer

    def write_down(optimizer: torch.optim.Optimizer, *_: object) -> None:
        whose = next(name for name, each in optimizers.items() if each is optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            gradients[f"{whose} {number}"] = parameter.grad.to_local().cpu().clone()

    hooks = [optimizer.register_step_pre_hook(write_down) for optimizer in optimizers.values()]
    metrics = train_on(learner, batch, Clock(learner.ranks.device))
    for hook in hooks:
        hook.remove()
    return metrics, gradients


def a_tree(seed: int) -> list[TokenSequence]:
    """Branches of 9, 11, 14 and 20 tokens: all share 4, the last two share 8; all but 2 are trained."""
    trunk, bough = random_sequence(4, seed=seed).tokens, random_sequence(4, seed=seed + 1).tokens
    drawn = [random_sequence(length, seed=seed + length, prompt=2) for length in (9, 11, 14, 20)]
    begun = [trunk, trunk, np.concatenate([trunk, bough]), np.concatenate([trunk, bough])]
    return [
        dataclasses.replace(each, tokens=np.concatenate([prefix, each.tokens[len(prefix) :]]))
        for each, prefix in zip(drawn, begun, strict=True)
    ]


def in_order(packed: Packed, numbers: Tensor) -> dict[bytes, Tensor]:
    """The numbers of each sequence's loss tokens."""
    tokens = torch.split_with_sizes(packed.tokens, packed.lengths)
    counts = torch.bincount(packed.loss_sequence_ids, minlength=len(packed.lengths)).tolist()
    parts = torch.split_with_sizes(numbers, counts)
    return {each.numpy().tobytes(): part for each, part in zip(tokens, parts, strict=True)}


def test_a_trained_token_of_a_shared_prefix_counts_in_every_sequence_that_has_it(tiny: Path, ranks: Ranks) -> None:
    """By each alone; its weight is another in every sequence."""
    model = load_model(tiny, ranks=ranks, settings=FLOAT32)
    branches = a_tree(seed=1)
    packed = pack(branches, share_prefixes=True)
    assert sum(packed.computed_lengths) == sum(packed.lengths) - 4 * 3 - 4
    found = model(packed).logprobs
    (found * packed.advantages[packed.loss_positions]).sum().backward()
    of_shared = gradients(model)
    for branch in branches:
        alone = pack([branch])
        logprobs = model(alone).logprobs
        key = alone.tokens.numpy().tobytes()
        torch.testing.assert_close(in_order(packed, found)[key], logprobs, rtol=0, atol=1e-5)
        (logprobs * alone.advantages[alone.loss_positions]).sum().backward()
    torch.testing.assert_close(of_shared, gradients(model), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("window", [2, 5, 9])
def test_a_sliding_window_reaches_into_the_shared_prefix(window: int, tmp_path: Path, ranks: Ranks) -> None:
    layers = ["sliding_attention", "full_attention"]
    save_tiny_model(tmp_path, use_sliding_window=True, sliding_window=window, layer_types=layers, num_key_value_heads=1)
    model = load_model(tmp_path, ranks=ranks, settings=FLOAT32)
    shared, apart = (pack(a_tree(seed=1), share_prefixes=share_prefixes) for share_prefixes in (True, False))
    found = {}
    for packed in (shared, apart):
        logprobs = model(packed).logprobs
        logprobs.sum().backward()
        found[packed.prefixes is None] = (in_order(packed, logprobs.detach()), gradients(model))
    torch.testing.assert_close(found[False][0], found[True][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[False][1], found[True][1], rtol=1e-5, atol=1e-4)


def test_a_reward_model_scores_the_ends_of_conversations_that_begin_alike(tiny: Path, ranks: Ranks) -> None:
    model = load_kind(RewardModel, tiny, ranks=ranks, settings=FLOAT32)
    torch.nn.init.ones_(model.score.weight.to_local())
    tree = a_tree(seed=3)
    ends = [dataclasses.replace(each, loss_mask=np.arange(each.num_tokens) == each.num_tokens - 1) for each in tree]
    with torch.no_grad():
        shared, apart = (in_order(packed, model(packed)) for packed in (pack(ends, share_prefixes=True), pack(ends)))
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5)
    assert len({round(float(score), 3) for score in apart.values()}) == 4


def test_bfloat16_differs_by_rounding_alone(tiny: Path, ranks: Ranks, device: torch.device) -> None:
    model = load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype="bfloat16"))
    found = []
    for share_prefixes in (True, False):
        packed = pack(a_tree(seed=1), share_prefixes=share_prefixes)
        logprobs = model(packed.to(device)).logprobs
        logprobs.sum().backward()
        gradient = torch.cat([each.flatten() for each in gradients(model)])
        found.append((in_order(packed, logprobs.detach().cpu()), gradient))
    (shared, of_shared), (apart, of_apart) = found
    for tokens, logprobs in apart.items():
        assert float((shared[tokens] - logprobs).abs().mean()) < 0.1
    assert relative_error(of_shared, of_apart) < 0.05


def test_a_model_that_does_not_share_refuses_a_pack_that_does(tiny: Path, ranks: Ranks) -> None:
    model = load_model(tiny, ranks=ranks, settings=FLOAT32)
    model.shares_prefixes = False
    with pytest.raises(ValueError, match="cannot share prefixes: pack without share_prefixes"):
        model(pack(a_tree(seed=1), share_prefixes=True))


def test_a_kernel_that_is_wrong_with_shared_keys_is_found_at_the_start_and_named(
    tiny: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that aligns a sequence's queries with its first keys."""
    plain = F.scaled_dot_product_attention

    def first_aligned(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, **others: Any) -> Tensor:
        mask = None if attn_mask is None else torch.ones_like(attn_mask).tril()
        return plain(query, key, value, attn_mask=mask, **others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", first_aligned)
    why = "prefixes that sequences share are computed for each: attention with keys that sequences share"
    check_that_it_shares_none(tiny, ranks, caplog, why)


def check_that_it_shares_none(folder: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture, why: str) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(folder, ranks=ranks, settings=FLOAT32)
    assert not model.shares_prefixes and why in caplog.text


def test_a_model_whose_states_differ_with_shared_prefixes_computes_them_for_each(
    tiny: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that reads a token's place in the row, and not its position."""
    rotate = modeling_qwen3.apply_rotary_pos_emb

    def by_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        place = torch.arange(q.shape[2]) % 16 / 1000 if q.shape[2] == 16 else torch.zeros(q.shape[2])
        return rotate(q * (1 + place)[:, None], k, cos, sin, **others)

    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", by_place)
    check_that_it_shares_none(tiny, ranks, caplog, "the model's log-probabilities would differ by")
