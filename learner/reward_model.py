"""A reward model: one number for a whole conversation, read at its last token."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from learner.export import save_hf
from learner.model import PackedModel
from learner.pack import Packed
from learner.ranks import Ranks


class ScoreHead(nn.Module):
    """One number from a hidden state, in float32, as transformers' sequence classification has it; 0 at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: Float[Tensor, "loss_tokens hidden"]) -> Float[Tensor, " loss_tokens"]:
        """The score of each state: (1, 2) under weights (3, 0.5) is 4."""
        return hidden.float() @ self.weight[0].float()


class RewardModel(PackedModel):
    """The policy's architecture with a score in place of the vocabulary's head.

    Unlike a critic, it reads the state behind a token: `loss_mask` marks the last token of each conversation.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, folder: Path) -> None:
        super().__init__(causal_lm, folder=folder)
        causal_lm.get_output_embeddings().weight = None  # a tied one stays as the input embedding
        self.score = ScoreHead(causal_lm.config.hidden_size)

    def forward(self, packed: Packed) -> Float[Tensor, " loss_tokens"]:  # type: ignore[override]
        """The score at each loss token."""
        scores: Tensor = self.score(self.hidden_states(packed)[packed.loss_mask])
        return scores

    def heads(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The score's weights, by their name in the folder."""
        yield "score.weight", self.score.weight


def save_reward_model(model: RewardModel, folder: Path, *, ranks: Ranks) -> None:
    """Write a folder that transformers' AutoModelForSequenceClassification loads. Every rank calls it."""
    save_hf(model, folder, ranks=ranks)
    if ranks.rank == 0:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
        if name:  # without, the trunk and `score.weight` are there all the same
            config["architectures"] = [name]
        config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        path.write_text(json.dumps(config, indent=2) + "\n")
