"""What is published of a model, and as what."""

import pytest
import torch

from learner.model import PackedModel, full_tensors, load_model
from learner.published import published_layout, published_tensors
from learner.ranks import Ranks
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, ranks=ranks, dtype="bfloat16", activation_checkpointing=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_weights_are_published_as_the_forward_pass_has_them(model: PackedModel, dtype: str) -> None:
    published = dict(published_tensors(model, dtype=dtype))
    rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in full_tensors(model)}
    torch.testing.assert_close(published, rounded, rtol=0, atol=0)
    laid_out = [(entry.name, entry.dtype, tuple(entry.shape)) for entry in published_layout(model, dtype=dtype)]
    assert laid_out == [(name, dtype, tuple(tensor.shape)) for name, tensor in published.items()]
