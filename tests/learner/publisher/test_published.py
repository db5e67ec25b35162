"""What is published of a model, and as what."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

from slipstream.actors.weights import staged_weights
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.actors.weights.staged_weights import ModelFolder
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.transfer.weights import Manifest, buffer_bytes, sealed
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.publisher.published import Published, adapted_folder, part_of
from slipstream.learner.ranks.ranks import Ranks
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model


@pytest.fixture(scope="module")
def model(tiny: Path, ranks: Ranks) -> PackedModel:
    return load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, dtype="bfloat16"))


@pytest.mark.parametrize("num_writers", [1, 2, 3, 8])
def test_the_parts_of_all_writers_are_the_whole_and_as_torch_shards(num_writers: int) -> None:
    for number in (0, 1, 2, 3, 7, 8, 9, 64, 65):
        parts = [part_of(number, rank=rank, num_writers=num_writers) for rank in range(2 * num_writers)]
        assert [index for part in parts for index in range(number)[part]] == list(range(number))
        assert all(range(number)[part] == range(0) or rank < num_writers for rank, part in enumerate(parts))
        for rank in range(num_writers):
            size, first = Shard.local_shard_size_and_offset(number, num_writers, rank)
            assert (parts[rank].start, parts[rank].stop) == (first, first + size)


@pytest.fixture(scope="module")
def adapted(tiny: Path, ranks: Ranks) -> PackedModel:
    """A model whose adapters are anything but 0."""
    model = load_model(tiny, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=LoraConfig(rank=4, alpha=12)))
    with torch.no_grad():
        for adapter in adapters_of(model.causal_lm).values():
            adapter.up.to_local().normal_(generator=torch.Generator().manual_seed(1))
    return model


def published(model: PackedModel) -> tuple[Manifest, torch.Tensor]:
    """The manifest of what is published of `model`, and its flat buffer."""
    entries, tensors = Published(model, dtype="bfloat16").layout, dict(Published(model, dtype="bfloat16").tensors())
    buffer = torch.zeros(buffer_bytes(entries), dtype=torch.uint8)
    for entry in entries:
        data = tensors[entry.name].contiguous().flatten().view(torch.uint8)
        buffer[entry.offset : entry.offset + entry.num_bytes] = data
    adapted = adapted_folder(model)
    return sealed(entries, buffer.numpy().data, policy_version=7, learner_epoch=1, adapted=adapted), buffer


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_actor_merges_adapters_to_the_learners_weights_bit_for_bit(
    adapted: PackedModel, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_weights, "NUM_MERGE_THREADS", num_threads)
    manifest, buffer = published(adapted)
    for dtype in (torch.float32, torch.bfloat16):
        folder = ModelFolder(adapted.folder, dtype=dtype, tied=True)
        folder.check(manifest)
        merged = folder.tensors(manifest, buffer)
        for name, tensor in full_tensors(adapted):
            assert torch.equal(merged[name].to(dtype), tensor.to(dtype))


def test_a_part_of_the_folder_alone_is_left_out_but_no_published_tensor(model: PackedModel, tmp_path: Path) -> None:
    manifest, _ = published(model)
    folder = save_tiny_model(tmp_path)
    save_file({"mtp.layers.0.norm.weight": torch.ones(3)}, folder / "further.safetensors")
    (folder / "model.safetensors").rename(folder / "most.safetensors")  # without an index every file counts
    known = ModelFolder(folder, dtype=torch.bfloat16, tied=True)
    known.check(manifest)
    for missing in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"):
        fewer = [entry for entry in manifest.tensors if entry.name != missing]
        with pytest.raises(WeightsUnfit, match=f"1 tensors differ, the first is {missing}"):
            known.check(msgspec.structs.replace(manifest, tensors=fewer))
    foreign = msgspec.structs.replace(manifest.tensors[0], name="visual.weight")
    with pytest.raises(WeightsUnfit, match=r"the first is visual\.weight"):
        known.check(msgspec.structs.replace(manifest, tensors=[*manifest.tensors, foreign]))


def test_adapters_of_another_folder_or_of_other_layers_are_refused(adapted: PackedModel, tmp_path: Path) -> None:
    manifest, _ = published(adapted)
    other = ModelFolder(save_tiny_model(tmp_path, seed=1), dtype=torch.float32, tied=True)
    with pytest.raises(WeightsRefused, match="adapters for weights that differ from those in"):
        other.check(manifest)
    mine = ModelFolder(adapted.folder, dtype=torch.float32, tied=True)
    with pytest.raises(WeightsRefused, match=r"adapters of shapes \[4, 64\] and None do not fit"):
        mine.check(msgspec.structs.replace(manifest, tensors=manifest.tensors[:1]))
    narrow = [msgspec.structs.replace(manifest.tensors[0], shape=[4, 63]), manifest.tensors[1]]
    with pytest.raises(WeightsRefused, match=r"shapes \[4, 63\] and \[64, 4\] do not fit .* of shape \[64, 64\]"):
        mine.check(msgspec.structs.replace(manifest, tensors=narrow))
