"""The reward model: one score for a conversation, at its last token; or, of the process, one for each turn."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import write_json
from slipstream.common.records.reward_protocol import CRITICS, KINDS, OUTCOME, Kind
from slipstream.common.transfer.model_folder import weight_files
from slipstream.learner.batch.pack import Packed
from slipstream.learner.model.critic import ValueHead
from slipstream.learner.model.export import save_hf
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_kind
from slipstream.learner.ranks.ranks import Ranks

SCORE = "score.weight"  # the name in transformers
OFFSET = "score_offset"  # in config.json, of a critic: what is added to its score


class RewardModel(PackedModel):
    """The policy's architecture with a score head instead of the output embedding.

    Unlike a critic, it reads the state after a token: `loss_mask` marks the last token of each conversation. If it is
    one of the process, it marks the last token of each turn, and the score is the log-odds of success from there.
    """

    kind: Kind = OUTCOME
    offset = 0.0  # to add to the score

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path, settings: ModelSettings) -> None:
        super().__init__(causal_lm, folder=folder, settings=settings)
        causal_lm.get_output_embeddings().weight = None  # a tied weight stays as the input embedding
        self.score = ValueHead(1, causal_lm.config.get_text_config().hidden_size)

    def forward(self, packed: Packed) -> Float[Tensor, " loss_tokens"]:  # type: ignore[override]
        """The score at each loss token."""
        of = packed.loss_states(before=0)
        return of.of_all_ranks(self.score(self.hidden_states(packed)[of.places]))

    def heads(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of the score head, by their name in the folder."""
        yield SCORE, self.score.weight


def save_reward_model(model: RewardModel, folder: Path, *, kind: Kind = OUTCOME, ranks: Ranks) -> None:
    """Write a folder that transformers' AutoModelForSequenceClassification loads. Every rank calls it."""
    save_hf(model, folder, ranks=ranks)
    if ranks.rank == 0:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
        if name:  # otherwise the folder still has the trunk and `score.weight`
            config["architectures"] = [name]
        config |= {"id2label": {"0": kind}, "label2id": {kind: 0}}
        config |= {OFFSET: model.offset} if kind in CRITICS else {}
        write_json(path, config)


@torch.no_grad()
def load_reward_model(folder: Path, *, ranks: Ranks, settings: ModelSettings) -> RewardModel:
    """Load what `save_reward_model` wrote, frozen. Every rank calls it, and reads the folder.

    Raises ConfigError for a folder without a score head of one output, and for a critic without its offset.
    """
    weight = _read_score(folder)
    model = load_kind(RewardModel, folder, ranks=ranks, settings=settings.frozen())
    set_score(model, weight, ranks=ranks)
    config = model.causal_lm.config
    labels = list((config.id2label or {}).values())
    model.kind = next((kind for kind in KINDS if labels == [kind]), OUTCOME)
    if model.kind in CRITICS:
        model.offset = _offset(folder, getattr(config, OFFSET, None))
    return model.requires_grad_(False)


@torch.no_grad()
def set_score(model: RewardModel, weight: Float[Tensor, "1 hidden"], *, ranks: Ranks) -> None:
    """Replace the weights of the score head. Every rank calls it, with the same `weight`."""
    head = model.score.weight
    assert isinstance(head, DTensor)
    head.to_local().copy_(distribute_tensor(weight.to(ranks.device), ranks.mesh, head.placements).to_local())


def _offset(folder: Path, found: object) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ConfigError(
            f"{folder / 'config.json'} must have a finite number `{OFFSET}`, got {found!r}; export the critic again"
        )
    return float(found)


def _read_score(folder: Path) -> Tensor:
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            if SCORE in file.keys():  # noqa: SIM118 - not a mapping
                weight: Tensor = file.get_tensor(SCORE).float()
                if len(weight) == 1:
                    return weight
    raise ConfigError(
        f"the reward model {folder} has no {SCORE} with one output; it must be a folder that `slipstream fit reward` "
        "or `slipstream fit prm` wrote, one of `slipstream export --critic`, or a sequence classifier with one label"
    )
