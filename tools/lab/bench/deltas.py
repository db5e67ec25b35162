"""A part of `make bench-weights`: the weights of a real fine-tuning, step by step."""

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.common.config.learner_config import OptimConfig
from slipstream.learner.model.optimizer import make_optimizer
from slipstream.tools.lab.bench.benchmark import DOCS

PRETRAINING_STEPS = 200
PRETRAINING_LR = 2e-3
NUM_SEQUENCES, NUM_BYTES = 12, 96  # a batch


class Trace:
    """A small Qwen3 that has learnt the bytes of this repository's docs, and continues at a learning rate of RL.

    Its master weights are float32, trained by AdamW with the default settings of a run. Bfloat16 copies are published.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=256,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=32,
                max_position_embeddings=NUM_BYTES,
                tie_word_embeddings=True,
            )
        )
        self._optimizer = make_optimizer(self._model, config=OptimConfig(lr=PRETRAINING_LR))
        for _ in range(PRETRAINING_STEPS):
            self.step()
        self._optimizer = make_optimizer(self._model, config=OptimConfig())

    def step(self) -> None:
        """Make one optimizer step on newly sampled bytes."""
        starts = torch.randint(len(self._text) - NUM_BYTES, (NUM_SEQUENCES, 1))
        tokens = self._text[starts + torch.arange(NUM_BYTES)]
        loss = self._model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(self._model.parameters(), OptimConfig().max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def published(self) -> list[tuple[str, torch.Tensor]]:
        """The current weights, rounded to bfloat16."""
        return [(name, parameter.detach().to(torch.bfloat16)) for name, parameter in self._model.named_parameters()]
