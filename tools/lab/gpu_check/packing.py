"""Log-probabilities of 40 packed sequences, against each packed alone, and against transformers on the CPU."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.ranks.ranks import Ranks, leave_ranks
from slipstream.tools.lab.families.tiny import FAMILIES, MAX_TOKENS, sequence
from slipstream.tools.lab.gpu_check import small
from slipstream.tools.lab.gpu_check.findings import Findings

NUM_SEQUENCES = 40
# Grouped queries; with a sliding window; with experts; with sinks; with layers that carry a state.
KINDS = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text, bfloat16")
MAX_FLOAT32_NATS = 1e-3  # of one token; the learner refuses a model at this
MAX_BFLOAT16_NATS = 0.1  # mean over tokens: these weights are large, and bfloat16 has two digits


def check(findings: Findings, device: str) -> None:
    """Each family in float32 and bfloat16."""
    ranks = small.one_rank(device)
    with tempfile.TemporaryDirectory() as root:
        for family in KINDS:
            folder = small.save(family, Path(root))
            expected = _by_transformers(folder)
            for dtype in ("float32", "bfloat16"):
                model = small.load(folder, ranks=ranks, dtype=dtype).model
                what = f"{FAMILIES[family].model_type}, {dtype}"
                _check(findings, what, model, expected, ranks=ranks, exact=dtype == "float32")
    leave_ranks()


def _check(findings: Findings, what: str, model: PackedModel, expected: Tensor, *, ranks: Ranks, exact: bool) -> None:
    sequences = _sequences()
    with torch.no_grad():
        packed = model(pack(sequences).to(ranks.device)).logprobs.cpu()
        alone = torch.cat([model(pack([each]).to(ranks.device)).logprobs.cpu() for each in sequences])
    for against, theirs in {"each alone": alone, "transformers in float32 on the CPU": expected}.items():
        difference = (packed - theirs).abs()
        if exact:
            findings.at_most(f"{what}: packed against {against}", float(difference.max()), MAX_FLOAT32_NATS, "nats")
        else:
            name = f"{what}: packed against {against}, mean"
            findings.at_most(name, float(difference.mean()), MAX_BFLOAT16_NATS, "nats")
            findings.note(f"{what}: packed against {against}, largest", float(difference.max()), "nats")


def _sequences() -> list[TokenSequence]:
    """In the order of the pack: longest first."""
    lengths = np.random.default_rng(1).integers(2, MAX_TOKENS, NUM_SEQUENCES)
    return [sequence(length, seed=length) for length in sorted(lengths.tolist(), reverse=True)]


def _by_transformers(folder: Path) -> Tensor:
    causal_lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    found = []
    with torch.no_grad():
        for each in _sequences():
            tokens = torch.from_numpy(each.tokens).long()
            table = causal_lm(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
            found.append(table[:-1].gather(1, tokens[1:, None]).squeeze(1))
    return torch.cat(found)
