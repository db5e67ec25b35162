"""Parts of `make bench-weights`: the weights of a real fine-tuning step by step, and the speed of deltas."""

import time

import numpy as np
import torch
import xxhash
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.common.config.learner_config import OptimConfig
from slipstream.common.transfer.delta import apply_delta, encode_delta
from slipstream.common.transfer.weights import buffer_bytes, layout
from slipstream.learner.model.optimizer import BETAS, EPS
from slipstream.tools.lab.bench.benchmark import DOCS, Row

PRETRAINING_STEPS = 200
PRETRAINING_LR = 2e-3
NUM_SEQUENCES, NUM_BYTES = 12, 96  # a batch
SPEED_ELEMENTS = 1 << 26  # 128 MiB in bfloat16
SPEED_DENSITY = 0.01


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
        self._optimizer = self._adamw(PRETRAINING_LR)
        for _ in range(PRETRAINING_STEPS):
            self.step()
        self._optimizer = self._adamw(OptimConfig().lr)

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

    def _adamw(self, lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._model.parameters(),
            lr=lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=OptimConfig().weight_decay,
        )


def delta_speed(num_repeats: int) -> Row:
    """Time to make and apply a delta, against hashing the same weights, which every version needs anyway."""
    entries = layout([("w", "bfloat16", (SPEED_ELEMENTS,))])
    random = np.random.default_rng(0)
    old = bytearray(random.bytes(buffer_bytes(entries)))
    new = bytearray(old)
    np.frombuffer(new, dtype=np.uint16)[random.choice(SPEED_ELEMENTS, int(SPEED_DENSITY * SPEED_ELEMENTS))] ^= 1
    delta_s, hash_s = [], []
    for _ in range(num_repeats):
        target = bytearray(old)
        started = time.perf_counter()
        delta = encode_delta(memoryview(old), memoryview(new), entries)
        assert delta is not None
        apply_delta(memoryview(delta), memoryview(target))
        delta_s.append(time.perf_counter() - started)
        assert target == new
        started = time.perf_counter()
        xxhash.xxh3_64_intdigest(new)
        hash_s.append(time.perf_counter() - started)
    return Row.of(
        "deltas: making and applying one at 1 % changed, beside hashing the weights",
        [1e3 * seconds for seconds in delta_s],
        unit="ms",
        against=[1e3 * seconds for seconds in hash_s],
    )
