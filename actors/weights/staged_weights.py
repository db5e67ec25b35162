"""Turns received bytes into the tensors that the engine loads: full weights, or merged adapters.

An adapter is added to its weight by one operation in float32, and the sum is rounded to the engine's dtype:

    W + (alpha / rank) B A

The learner uses the same operation when it exports. On the same CPU both give the same bits; other hardware may add in
another order. So the hashes are of the adapters and of the folder, not of the merged weights.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

from slipstream.actors.weights.refused import WeightsUnfit
from slipstream.common.transfer.model_folder import folder_root, has_weights, tensor_shapes, weight_files
from slipstream.common.transfer.weights import DOWN, UP, Manifest, TensorEntry

# An engine's process computes with one thread. Half of the cores stay with those that generate.
NUM_MERGE_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_of(entry: TensorEntry, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor `entry` as a view of the flat `buffer`, without a copy."""
    flat = buffer[entry.offset : entry.offset + entry.num_bytes]
    return flat.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: up to the number of its layer, or all but its last name.

    >>> part_of("model.layers.61.mlp.gate.weight"), part_of("lm_head.weight")
    ('model.layers.61', 'lm_head')
    """
    names = name.split(".")
    number = next((place for place, each in enumerate(names) if each.isdigit()), len(names) - 2)
    return ".".join(names[: number + 1])


class ModelFolder:
    """The model folder of an engine: published weights must fit it, and adapters are merged into it."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, tied: bool) -> None:
        """`dtype` is the engine's; `tied` means that its head is its embedding. Raises ValueError without shapes."""
        self._folder = folder
        self._dtype = dtype
        self._tied = tied
        self._shapes = tensor_shapes(folder)
        self._root = ""  # computed when the first adapters arrive

    def check(self, manifest: Manifest) -> None:
        """Raise WeightsUnfit unless `manifest` has the folder's tensors, or adapters of this folder.

        Parts that are missing as a whole keep their weights: a folder may have some that transformers leaves out, such
        as layers that predict further tokens (`mtp.`).
        """
        if manifest.adapted is None:
            self._check_whole(manifest)
            return
        self._root = self._root or (folder_root(self._folder) if has_weights(self._folder) else "none")
        if manifest.adapted.root != self._root:
            raise WeightsUnfit(
                f"version {manifest.policy_version} has adapters for weights that differ from those in {self._folder}; "
                "start the actor again: it pulls those of the learner"
            )
        offered = {entry.name: entry.shape for entry in manifest.tensors}
        for name in _adapted_names(manifest):
            down, up, weight = offered.get(name + DOWN), offered.get(name + UP), self._shapes.get(name)
            if down is None or up is None or down[:1] != up[1:] or up[:1] + down[1:] != weight:
                raise WeightsUnfit(
                    f"version {manifest.policy_version}: adapters of shapes {down} and {up} do not fit {name} of shape "
                    f"{weight}"
                )

    def tensors(self, manifest: Manifest, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors to load, by name, from the received `buffer` of a checked manifest.

        Full weights are views of the buffer. With adapters, the other weights stay on disk, mapped into memory.
        """
        received = {entry.name: tensor_of(entry, buffer) for entry in manifest.tensors}
        if manifest.adapted is None:
            return received
        weights = dict[str, torch.Tensor]()
        for file in weight_files(self._folder):
            weights |= load_file(file)  # mapped into memory, and read when it is used
        names, scaling = sorted(_adapted_names(manifest)), manifest.adapted.scaling

        def merged(name: str) -> torch.Tensor:
            up, down = received[name + UP], received[name + DOWN]
            return torch.addmm(weights[name].float(), up, down, alpha=scaling).to(self._dtype)

        with ThreadPoolExecutor(NUM_MERGE_THREADS, thread_name_prefix="merge") as threads:
            return weights | dict(zip(names, threads.map(merged, names), strict=True))

    def _check_whole(self, manifest: Manifest) -> None:
        offered = {entry.name: entry.shape for entry in manifest.tensors}
        expected = dict(self._shapes)
        if self._tied:  # a second name of the embedding, which a state_dict lists and a saved folder does not
            offered.pop("lm_head.weight", None)
            expected.pop("lm_head.weight", None)
        if offered == expected:
            return
        parts = {part_of(name) for name in offered}
        wrong = sorted(
            name
            for name in offered.keys() | expected.keys()
            if offered.get(name) != expected.get(name) and (name in offered or part_of(name) in parts)
        )
        if not wrong:
            return
        raise WeightsUnfit(
            f"version {manifest.policy_version} does not fit the model: {len(wrong)} tensors differ, the first is "
            f"{wrong[0]} (offered {offered.get(wrong[0])}, expected {expected.get(wrong[0])}); does the learner train "
            "another model?"
        )


def _adapted_names(manifest: Manifest) -> set[str]:
    return {entry.name.removesuffix(DOWN).removesuffix(UP) for entry in manifest.tensors}
