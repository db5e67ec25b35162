"""From received bytes to what the engine loads: the tensors themselves, or the model's folder with adapters merged in.

An adapter is added to its weight by one operation in float32, and the sum rounded to the engine's dtype:

    W + (alpha / rank) B A

It is the operation by which the learner merges when it exports. On the same CPU the same bits come of it; other
hardware may add up in another order. So the hashes are of the adapters, and of the folder that they belong to.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from actors.engine import WeightsRefused
from common.model_folder import folder_root
from common.weights import DOWN, UP, Manifest, TensorEntry

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_of(entry: TensorEntry, buffer: torch.Tensor) -> torch.Tensor:
    """The view of flat `buffer` that is `entry`: no copy."""
    flat = buffer[entry.offset : entry.offset + entry.num_bytes]
    return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


class ModelFolder:
    """The folder that an engine was started from: what published weights must fit, and adapters are added to."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, tied: bool) -> None:
        """`dtype` is the engine's; `tied` says that its head is its embedding. Raises ValueError without weights."""
        self._folder = folder
        self._dtype = dtype
        self._tied = tied
        self._shapes = {name: list(tensor.shape) for name, tensor in self._tensors()}
        if not self._shapes:
            raise ValueError(f"`model.path` {folder} holds no *.safetensors; save the model with save_pretrained")
        self._root = ""  # hashed when the first adapters come

    def check(self, manifest: Manifest) -> None:
        """Raise WeightsRefused unless `manifest` describes exactly the folder's tensors, or adapters of this folder."""
        if manifest.adapted is None:
            self._check_whole(manifest)
            return
        self._root = self._root or folder_root(self._folder)
        if manifest.adapted.root != self._root:
            raise WeightsRefused(
                f"version {manifest.policy_version} are adapters of other weights than those in {self._folder}; "
                "this host needs the same folder as the learner's"
            )
        offered = {entry.name: entry.shape for entry in manifest.tensors}
        for name in _adapted_names(manifest):
            down, up, weight = offered.get(name + DOWN), offered.get(name + UP), self._shapes.get(name)
            if down is None or up is None or down[:1] != up[1:] or up[:1] + down[1:] != weight:
                raise WeightsRefused(
                    f"version {manifest.policy_version}: adapters of {down} and {up} do not fit {name} of {weight}"
                )

    def tensors(self, manifest: Manifest, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the engine loads, by name, for the received `buffer` of a manifest that was checked.

        Whole weights are views of the buffer. Beside adapters, weights without one stay on disk, mapped into memory.
        """
        received = {entry.name: tensor_of(entry, buffer) for entry in manifest.tensors}
        if manifest.adapted is None:
            return received
        weights = dict(self._tensors())
        for name in _adapted_names(manifest):
            up, down = received[name + UP], received[name + DOWN]
            merged = torch.addmm(weights[name].float(), up, down, alpha=manifest.adapted.scaling)
            weights[name] = merged.to(self._dtype)
        return weights

    def _check_whole(self, manifest: Manifest) -> None:
        offered = {entry.name: entry.shape for entry in manifest.tensors}
        expected = dict(self._shapes)
        if self._tied:  # the same tensor under a second name: a state_dict lists it, a saved folder does not
            offered.pop("lm_head.weight", None)
            expected.pop("lm_head.weight", None)
        if offered == expected:
            return
        wrong = sorted(name for name in offered.keys() | expected.keys() if offered.get(name) != expected.get(name))
        raise WeightsRefused(
            f"version {manifest.policy_version} does not fit the model: {len(wrong)} tensors differ, first {wrong[0]} "
            f"(offered {offered.get(wrong[0])}, expected {expected.get(wrong[0])}); is the learner training another "
            "model?"
        )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in the folder; they are read when they are used."""
        for file in sorted(self._folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)


def _adapted_names(manifest: Manifest) -> set[str]:
    return {entry.name.removesuffix(DOWN).removesuffix(UP) for entry in manifest.tensors}
