"""Two steps with each thing that a learner may have besides its policy, on the device and on the CPU.

Adapters, compiled layers, weights on the host, critics, a reference, a proximal policy, tokens that were sampled from
few words and at several temperatures, and shared prefixes, with a small model. Only a policy whose second step agrees
has been changed alike by the first. The CPU cuts the batch into other micro-batches, and shares no prefixes. Without a
GPU nothing is compiled: that is most of the time.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from slipstream.common.config.config import Config, load_config
from slipstream.common.records.kept_sets import KeptSets
from slipstream.learner.batch.pack import TokenSequence, count_loss_tokens, count_trajectories, micro_batches
from slipstream.learner.model.critic import load_critic, policy_kind
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, load_kind, load_model
from slipstream.learner.model.proximal import Proximal
from slipstream.learner.ranks.ranks import Ranks, leave_ranks
from slipstream.learner.step.step import StepBatch, StepModels, StepSettings, train_step
from slipstream.tools.lab.families.tiny import MAX_TOKENS
from slipstream.tools.lab.gpu_check import small
from slipstream.tools.lab.gpu_check.findings import Findings

CRITIC = ("objective.advantage=gae", "objective.critic=own")
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "a policy alone": (),
    "adapters": ("model.lora.rank=4",),
    "compiled layers": ("learner.compile=true",),
    "activation checkpointing": ("learner.activation_checkpointing=true",),
    "weights on the host": ("learner.cpu_offload=true",),
    "adapters on the host, compiled": ("model.lora.rank=4", "learner.cpu_offload=true", "learner.compile=true"),
    "an entropy bonus": ("objective.entropy_bonus=0.01",),
    "a critic of its own": CRITIC,
    "a critic on the policy's trunk": ("objective.advantage=gae", "objective.critic=shared"),
    "a reference": ("objective.kl_coefficient=0.1",),
    "a proximal policy": ("objective.correction=decoupled", "objective.dual_clip=3"),
    "everything": (*CRITIC, "objective.kl_coefficient=0.1", "objective.correction=decoupled", "learner.compile=true"),
}
KEPT, SHARED = "tokens sampled from few words, at two temperatures", "shared prefixes"
NUM_STEPS = 2
# Of a gradient's norm. In bfloat16, which alone shares prefixes on a GPU, as much as in `steps`.
MAX_ERROR, MAX_BFLOAT16_ERROR = 1e-3, 5e-2
MICRO_BATCH_TOKENS, ON_CPU = 256, 128


def check(findings: Findings, device: str) -> None:
    """Each combination in float32, but shared prefixes in bfloat16 where only that shares them."""
    ranks = small.one_rank(device)
    with tempfile.TemporaryDirectory() as root:
        folder = small.save("qwen3", Path(root))
        for name, settings in {**COMBINATIONS, KEPT: ()}.items():
            config = _config(folder, *settings)
            if device == "cuda" or not config.learner.compile:
                _compare(findings, name, config, ranks=ranks, max_error=MAX_ERROR)
        dtype, max_error = ("bfloat16", MAX_BFLOAT16_ERROR) if device == "cuda" else ("float32", MAX_ERROR)
        if device == "cuda" and find_spec("flash_attn"):
            findings.note(SHARED, "not shared: the flash-attn package is installed")
        else:
            _compare(findings, SHARED, _config(folder, f"model.dtype={dtype}"), ranks=ranks, max_error=max_error)
    leave_ranks()


def _config(folder: Path, *settings: str) -> Config:
    always = ("model.dtype=float32", f"model.max_tokens={MAX_TOKENS}", f"optim.lr={small.LR}")
    off = ("objective.guard_min_ess=0", "objective.guard_max_ratio=0", "objective.max_negative_kl=0")
    return load_config(None, [f"model.path={folder}", *always, *off, *settings])


def _compare(findings: Findings, name: str, config: Config, *, ranks: Ranks, max_error: float) -> None:
    """The norms of the gradients of policy and critic in each step, here and on the CPU."""
    plain = dataclasses.replace(config, learner=dataclasses.replace(config.learner, compile=False, cpu_offload=False))
    found = _norms(name, config, ranks=ranks, shares=name == SHARED, micro_batch_tokens=MICRO_BATCH_TOKENS)
    expected = _norms(name, plain, ranks=small.on_cpu(ranks), shares=False, micro_batch_tokens=ON_CPU)
    errors = np.abs(np.array(found) / np.array(expected) - 1)
    findings.at_most(f"{name}: error of a gradient's norm", float(errors.max()), max_error)


def _norms(name: str, config: Config, *, ranks: Ranks, shares: bool, micro_batch_tokens: int) -> list[float]:
    """Of the gradients of every step, none of which may be skipped."""
    model = load_kind(policy_kind(config), config.model.path, ranks=ranks, settings=ModelSettings.of(config))
    optimizer = make_optimizer(model.causal_lm, config=config.optim)
    reference = None
    if config.objective.kl_coefficient:
        reference = load_model(config.model.path, ranks=ranks, settings=model.settings.frozen()).requires_grad_(False)
    models = StepModels(
        policy=model,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=config.optim, num_steps=100),
        critic=load_critic(config, model, ranks=ranks),
        reference=reference,
    )
    proximal = Proximal(model, decay=config.objective.proximal_decay) if config.objective.has_proximal else None
    norms = list[float]()
    for step in range(NUM_STEPS):
        batch = _batch(name, step, vocab_size=model.vocab_size)
        packs = micro_batches(batch, max_tokens=micro_batch_tokens, num_ranks=1, rank=0, share_prefixes=shares)
        if shares and not any(each.prefixes for each in packs):
            raise AssertionError(f"{name}: no pack of step {step} shares a prefix")
        metrics = train_step(
            models,
            StepBatch(
                micro_batches=packs,
                proximal_logprobs=proximal.logprobs(model, packs) if proximal else None,
                num_loss_tokens=count_loss_tokens(batch),
                num_trajectories=count_trajectories(batch),
            ),
            settings=StepSettings(objective=config.objective, max_grad_norm=1.0),
            ranks=ranks,
        )
        if metrics.skipped:
            raise AssertionError(f"{name}: step {step} was skipped")
        if proximal:
            proximal.after_step(model)
        norms.append(metrics.grad_norm)
        if metrics.values is not None:
            norms.append(metrics.values.grad_norm)
    return norms


def _batch(name: str, step: int, *, vocab_size: int) -> Sequence[TokenSequence]:
    """That of the other items, with values and returns, and what `name` needs."""
    random = np.random.default_rng(step)
    batch = []
    for number, plain in enumerate(small.batch(step, vocab_size)):
        values, returns = random.normal(size=(2, plain.num_tokens)).astype(np.float32)
        made = dataclasses.replace(plain, old_values=values, returns=returns)
        if name == KEPT:
            made = dataclasses.replace(made, kept=_kept(made, vocab_size), temperature=0.5 + number % 2)
        batch.append(made)
    if name == SHARED:  # all begin as the longest one does
        longest = max(batch, key=lambda each: each.num_tokens)
        batch = [dataclasses.replace(each, tokens=longest.tokens[: each.num_tokens]) for each in batch]
    return batch


def _kept(sequence: TokenSequence, vocab_size: int) -> KeptSets:
    """The token itself and the next two words; every third token was sampled from all words."""
    sampled = sequence.tokens[sequence.loss_mask]
    sets = [
        [] if number % 3 == 2 else sorted({int(token + more) % vocab_size for more in range(3)})
        for number, token in enumerate(sampled)
    ]
    counts = np.array([len(each) for each in sets], dtype="<u2")
    return KeptSets(counts=counts.tobytes(), ids=np.concatenate(sets).astype("<i4").tobytes())
