"""Loads an exported folder in a fresh process, and compares what that computes with the learner."""

import json
import subprocess
import sys
from pathlib import Path

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import write_whole
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.probe import WORST_TIMES, Probe, differences
from slipstream.learner.model.packed_model import PackedModel
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.model.skeleton import refused_together
from slipstream.learner.ranks.ranks import Ranks

READER = "slipstream.learner.model.reader"
TEXT = "It costs 3.50, she added.\n\n    for n in range(10): print(n)  # Zürich, 東京"
TIMEOUT_S = 400.0  # less than other ranks wait


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
