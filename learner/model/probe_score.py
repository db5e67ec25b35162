"""Scores the probe of a version with the weights to be published; an export must give the same in a fresh process.

See `slipstream.common.transfer.probe`.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import write_whole
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.probe import MAX_PROBE_TOKENS, TOLERANCES, WORST_TIMES, Probe, differences
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.skeleton import refused_together
from slipstream.learner.ranks.ranks import Ranks

READER = "slipstream.learner.model.reader"
TEXT = "It costs 3.50, she added.\n\n    for n in range(10): print(n)  # Zürich, 東京"
TIMEOUT_S = 400.0  # less than other ranks wait
_SEED = 20


@torch.no_grad()
def probe_of(model: PackedModel, device: torch.device) -> Probe:
    """One forward pass over at most MAX_PROBE_TOKENS random tokens. Collective.

    The tokens are the same for every version, so that the scores of one can be compared with those of the next.
    """
    room = (model.settings.max_tokens or MAX_PROBE_TOKENS + 1) - 1  # an engine's prompt leaves room for one token
    known = np.arange(model.vocab_size, dtype=np.int32)
    if model.absent is not None:
        known = np.delete(known, model.absent.cpu().numpy())
    tokens = np.random.default_rng(_SEED).choice(known, min(room, MAX_PROBE_TOKENS))
    sequence = TokenSequence.bare(tokens, np.arange(len(tokens)) > 0)
    with model.at_temperature(1.0):
        logprobs = model(pack([sequence]).to(device)).logprobs
    return Probe(tokens=tokens.tolist(), logprobs=logprobs.tolist(), tolerance=TOLERANCES[model.settings.dtype])


def check_export(model: PackedModel, folder: Path, *, ranks: Ranks) -> None:
    """Load the exported `folder` by transformers alone, and write the result beside it. Every rank calls it.

    Raises ConfigError, on every rank, if it does not load, encodes other tokens, or gives other log-probabilities than
    `model`, with the tolerance of a probe.
    """
    probe, file = probe_of(model, ranks.device), folder.with_name("export_check.txt")
    with refused_together(model.folder, ranks=ranks):
        if ranks.rank == 0:
            file.unlink(missing_ok=True)
            write_whole(file, f"{_compared(model, folder, probe)}\n")


def _compared(model: PackedModel, folder: Path, probe: Probe) -> str:
    rope = model.causal_lm.config.get_text_config().to_dict().get("rope_parameters") or {}
    if (
        rope.get("rope_type") == "longrope"
        and (model.settings.max_tokens or 0) > rope["original_max_position_embeddings"]
    ):
        return "was not compared: transformers chooses the rotary frequencies of each sequence by its length"
    command, order = [sys.executable, "-P", "-m", READER, str(folder)], json.dumps([TEXT, probe.tokens])
    try:
        done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"was not compared: a fresh process had not loaded it after {TIMEOUT_S:.0f} s"
    if done.returncode < 0:
        return f"was not compared: a fresh process that loads it ended by signal {-done.returncode}; is memory short?"
    if done.returncode:
        raise ConfigError(f"the export {folder} does not load in a fresh process: {done.stderr.strip()[-500:]}")
    version, encoded, logprobs = json.loads(done.stdout.splitlines()[-1])
    if encoded != load_tokenizer(model.folder)(TEXT)["input_ids"]:
        raise ConfigError(f"the export {folder} encodes {TEXT!r} otherwise than the tokenizer in {model.folder}")
    nats, allowed = differences(probe.logprobs, logprobs), probe.tolerance
    mean, worst = sum(nats) / len(nats), max(nats)
    result = (
        f"loaded by transformers {version} in a fresh process, differs from the learner by {mean:.2g} nats a token, "
        f"{worst:.2g} at most (allowed: {allowed:g} and {WORST_TIMES * allowed:g})"
    )
    if not (mean <= allowed and worst <= WORST_TIMES * allowed):
        raise ConfigError(f"the export {folder}, {result}; compare its config.json with that in {model.folder}")
    return result
