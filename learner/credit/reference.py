"""The reference policy of the objective's KL divergence: the policy before the first step, or another model.

A copy of the policy is written to disk when it is taken, so that a resumed run uses the same one.
"""

from pathlib import Path

import msgspec
import torch.distributed as dist

from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import sync_path, whole_folder
from slipstream.common.process.run_dir import RunDir
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.model_folder import blob_of
from slipstream.learner.checkpoint.sealed_file import check_file, read_sealed, write_sealed
from slipstream.learner.model.export import save_hf
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.ranks.ranks import Ranks

HASHES = "hashes.json"


class _Files(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    xxh3: dict[str, str]  # of each file of the folder, by name


def reference_at(
    model: PackedModel, objective: ObjectiveConfig, run_dir: RunDir, *, step: int, ranks: Ranks
) -> PackedModel | None:
    """The reference of a run at `step`; None if its objective has no KL divergence.

    Before the first step it is a copy of `model`, which is written to disk; later it is read from there. It costs the
    memory of the weights once more, and a forward pass per step. Every rank calls it, on one file system. With
    `objective.reference_model` it is the model in that folder. Raises ConfigError if the run never wrote a reference,
    if its files are damaged, or if the other model does not fit the policy.
    """
    if not objective.kl_coefficient or objective.teacher_url:
        return None  # a server's is asked by `slipstream.learner.credit.teacher`
    if objective.reference_model:
        folder = Path(objective.reference_model)
        check_same_tokenizer("objective.reference_model", folder, model.folder)
    else:
        folder = run_dir.reference / "step_000000"
        if step == 0:
            _write(model, folder, ranks=ranks)
        elif not folder.is_dir():
            raise ConfigError(
                f"`objective.kl_coefficient` must be 0, got {objective.kl_coefficient}: this run wrote no reference at "
                "step 0; start a new run"
            )
        _check_whole(folder)
    return load_model(folder, ranks=ranks, settings=model.settings.frozen()).requires_grad_(False)


def check_same_tokenizer(key: str, folder: Path, ours: Path) -> None:
    """Raise ConfigError unless the model in `folder`, the value of `key`, has the vocabulary of that in `ours`."""
    theirs, known = (load_tokenizer(each).get_vocab() for each in (folder, ours))
    if theirs != known:
        raise ConfigError(
            f"`{key}` {folder} has another tokenizer than the policy in {ours}, so it would score other text than the "
            "policy wrote; use a model of the same family"
        )


def _write(model: PackedModel, folder: Path, *, ranks: Ranks) -> None:
    """Write the reference atomically: the folder gets its final name when every byte is on disk."""
    if ranks.rank == 0:
        with whole_folder(folder) as unnamed:  # one that was written before the run was resumed here has the same bits
            save_hf(model, unnamed, ranks=ranks)
            written = _Files(xxh3={path.name: blob_of(path).root for path in unnamed.iterdir()})
            write_sealed(unnamed / HASHES, written, schema=1)
            for path in (*unnamed.iterdir(), unnamed):
                sync_path(path)
        sync_path(folder.parent)
    else:
        save_hf(model, folder, ranks=ranks)
    dist.barrier()  # the others read what rank 0 writes


def _check_whole(folder: Path) -> None:
    """Raise ConfigError unless every file matches its hash: else the divergence would be from another policy."""
    files = read_sealed(folder / HASHES, _Files, schema=1, cure="restore the reference from a copy")
    for name, xxh3 in files.xxh3.items():
        check_file(folder / name, xxh3)
