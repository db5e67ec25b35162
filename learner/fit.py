"""Learning from what is written down: imitation, preferences (DPO), and a model of what is preferred.

Every gradient here is that of a weighted sum of what the model says of the loss tokens, and a step makes it in any
number of micro-batches on any number of ranks alike:

    sft      weight 1                                   what is said: log-probabilities
    dpo      weight beta * sigmoid(-margin), and minus  what is said: log-probabilities
             that on the side that is not preferred
    reward   weight sigmoid(-margin), and minus that    what is said: the score, at the last token

A margin needs both sides of a pair. So it is measured first, in a forward pass of its own, and the backward pass may
then find the two sides in different micro-batches.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from common.config import Config
from common.config_error import ConfigError
from common.metrics import Metrics, MetricsWriter
from common.run_dir import RunDir, write_json
from common.shutdown import Shutdown
from learner import checkpoint
from learner.checkpoint import Progress
from learner.checkpoint_writer import CheckpointWriter
from learner.examples import Example, Goal
from learner.model.export import save_adapters, save_hf
from learner.model.gradient import Update, apply_gradient, backward
from learner.learner import any_rank_is_told
from learner.measure import of_each_token
from learner.model.packed_model import PackedModel, expect_backward, load_kind
from learner.model.optimizer import make_optimizer, make_schedule
from learner.pack import Packed, TokenSequence, count_loss_tokens, micro_batches
from learner.objective.preference import Margins, dpo_margins, preference_loss, preference_slope
from learner.ranks import Ranks
from learner.model.reward_model import RewardModel, save_reward_model
from learner.step_metrics import summed_over_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Examples; of pairs for DPO also what the reference thinks of them."""

    examples: Sequence[Example]
    reference: Margins | None = None

    def at(self, places: Sequence[int]) -> "Material":
        reference = None if self.reference is None else self.reference[list(places)]
        return Material(examples=[self.examples[place] for place in places], reference=reference)


@dataclass(kw_only=True, slots=True)
class Fit:
    """What is being fitted, and how far that is."""

    goal: Goal
    config: Config
    ranks: Ranks
    model: PackedModel
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    progress: Progress

    def said(self, packed: Packed) -> Tensor:
        """What the model says of each loss token: its log-probability, or the score behind it."""
        if isinstance(self.model, RewardModel):
            said: Tensor = self.model(packed)
        else:
            chunk_tokens = self.config.learner.logprob_chunk_tokens
            said = self.model(packed, temperature=1.0, chunk_tokens=chunk_tokens).logprobs
        return said


def fit(
    goal: Goal,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    *,
    config: Config,
    run_dir: RunDir,
    ranks: Ranks,
    shutdown: Shutdown,
) -> bool:
    """Fit a model to `examples` and export it; False when told to stop before. A run that stopped goes on.

    Every rank passes all of the examples, in the same order. Raises ConfigError where the run is of something else.
    """
    _check_identity(run_dir.path / "fit.json", _identity(goal, examples, config), ranks=ranks)
    num_steps = config.fit.epochs * -(-len(examples) // config.fit.batch_rows)
    fitted = _load(goal, config, ranks=ranks, num_steps=num_steps)
    # Before any checkpoint is read: now the policy is the reference.
    taught, measured = (_material(fitted, each) for each in (examples, held_out))
    newest = checkpoint.latest_checkpoint(run_dir.checkpoints)
    if newest is not None:
        fitted.progress = checkpoint.load(
            newest, model=fitted.model, optimizer=fitted.optimizer, schedule=fitted.schedule
        )
        log.info("resumed from %s", newest.name)
    checkpoints = CheckpointWriter(run_dir.checkpoints, ranks=ranks, keep=config.learner.keep_checkpoints)
    writer = _writer(run_dir, fitted.progress) if ranks.rank == 0 else None
    try:
        finished = _train(fitted, taught, measured, checkpoints, writer, num_steps=num_steps, shutdown=shutdown)
        checkpoints.wait()
    finally:
        checkpoints.close()
        if writer:
            writer.close()
    if finished:
        _export(fitted, run_dir)
    return finished


def _identity(goal: Goal, examples: Sequence[Example], config: Config) -> dict[str, object]:
    """What a run is of: with anything else its checkpoints have nothing to do."""
    digest = hashlib.sha256()
    for example in examples:
        for side in example:
            for sequence in side:
                digest.update(sequence.tokens.tobytes() + sequence.loss_mask.tobytes())
    return {
        "goal": goal,
        "model.path": config.model.path,
        "fit.data": digest.hexdigest(),
        "fit.epochs": config.fit.epochs,
        "fit.batch_rows": config.fit.batch_rows,
        "fit.beta": config.fit.beta,
        "run.seed": config.run.seed,
    }


def _check_identity(path: Path, identity: dict[str, object], *, ranks: Ranks) -> None:
    if path.exists():
        before = json.loads(path.read_text())
        others = [name for name, value in identity.items() if before.get(name) != value]
        if others:
            raise ConfigError(
                f"the run in {path.parent} was begun with another {' and '.join(others)}; choose another `run.name`"
            )
    dist.barrier()  # nobody looks after the first has written
    if ranks.rank == 0:
        write_json(path, identity)


def _load(goal: Goal, config: Config, *, ranks: Ranks, num_steps: int) -> Fit:
    torch.manual_seed(config.run.seed)
    model = load_kind(
        RewardModel if goal == "reward" else PackedModel,
        config.model.path,
        ranks=ranks,
        dtype=config.model.dtype,
        activation_checkpointing=config.learner.activation_checkpointing,
        compile=config.learner.compile,
        cpu_offload=config.learner.cpu_offload,
        lora=config.model.lora,
    )
    optimizer = make_optimizer(model, config=config.optim)
    return Fit(
        goal=goal,
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(optimizer, config=config.optim, num_steps=num_steps),
        progress=Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0),
    )


def _material(fitted: Fit, examples: Sequence[Example]) -> Material:
    bare = Material(examples=examples)
    if fitted.goal != "dpo" or not examples:
        return bare
    return Material(examples=examples, reference=_differences(fitted, bare))


def _writer(run_dir: RunDir, progress: Progress) -> MetricsWriter:
    return MetricsWriter(jsonl=run_dir.metrics, tensorboard=run_dir.tensorboard, resume_step=progress.step)


def _train(
    fitted: Fit,
    taught: Material,
    measured: Material,
    checkpoints: CheckpointWriter,
    writer: MetricsWriter | None,
    *,
    num_steps: int,
    shutdown: Shutdown,
) -> bool:
    every = fitted.config.learner.checkpoint_every
    if fitted.progress.step == 0:
        _write_held_out(fitted, measured, writer)
    while (step := fitted.progress.step) < num_steps:
        places, ends_epoch = _batch_at(step, len(taught.examples), config=fitted.config)
        metrics = _step(fitted, taught.at(places))
        if writer:
            _say(writer.write(step + 1, metrics), f"step {step + 1} of {num_steps}")
        if ends_epoch:
            _write_held_out(fitted, measured, writer)
        told = any_rank_is_told(shutdown, fitted.ranks)
        if told or (step + 1) % every == 0 or step + 1 == num_steps:
            checkpoints.begin(
                fitted.model, fitted.optimizer, fitted.schedule, progress=fitted.progress, once_durable=_nothing
            )
        if told:
            break
    return fitted.progress.step == num_steps


def _batch_at(step: int, num_examples: int, *, config: Config) -> tuple[list[int], bool]:
    """The examples of the step after `step`, by place, and whether they are an epoch's last: known from the seed alone,
    so that a run that is resumed goes on with what it has not seen."""
    size = config.fit.batch_rows
    epoch, number = divmod(step, -(-num_examples // size))
    order = np.random.default_rng([config.run.seed, epoch]).permutation(num_examples)
    return order[number * size : (number + 1) * size].tolist(), (number + 1) * size >= num_examples


def _step(fitted: Fit, batch: Material) -> Metrics:
    """One optimizer step."""
    metrics, weights, divisor = _weights(fitted, batch)
    sequences = _weighed(batch.examples, weights)
    said_sum = _backward(fitted, sequences, divisor=divisor)
    update = apply_gradient(fitted.optimizer, fitted.schedule, max_grad_norm=fitted.config.optim.max_grad_norm)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    fitted.progress = msgspec.structs.replace(
        fitted.progress,
        step=fitted.progress.step + 1,
        policy_version=fitted.progress.policy_version + 1,
        tokens_trained=fitted.progress.tokens_trained + num_tokens,
    )
    if fitted.goal == "sft":
        metrics.add("fit/loss", -said_sum, divisor)
    return _with_update(metrics, update, num_tokens=num_tokens)


def _weights(fitted: Fit, batch: Material) -> tuple[Metrics, Sequence[Sequence[float]], float]:
    """What each side of each example weighs, and what all are divided by; with what the margins say already."""
    if fitted.goal == "sft":
        num_loss_tokens = sum(count_loss_tokens(side) for example in batch.examples for side in example)
        return Metrics(), [(1.0,)] * len(batch.examples), num_loss_tokens
    margins = _margins(fitted, batch)
    slopes = preference_slope(margins) * (fitted.config.fit.beta if fitted.goal == "dpo" else 1.0)
    metrics = Metrics()
    _add_margins(metrics, margins)
    return metrics, [(slope, -slope) for slope in slopes.tolist()], len(batch.examples)


def _weighed(examples: Sequence[Example], weights: Sequence[Sequence[float]]) -> list[TokenSequence]:
    return [
        dataclasses.replace(sequence, advantages=np.full(sequence.num_tokens, weight, dtype=np.float32))
        for example, sides in zip(examples, weights, strict=True)
        for side, weight in zip(example, sides, strict=True)
        for sequence in side
    ]


def _margins(fitted: Fit, batch: Material) -> Margins:
    differences = _differences(fitted, batch)
    if batch.reference is None:
        return differences
    return dpo_margins(differences, batch.reference, beta=fitted.config.fit.beta)


def _differences(fitted: Fit, pairs: Material) -> Margins:
    """What is said of the preferred side less what is said of the other, each summed over its loss tokens."""
    sums = _sums(fitted, pairs.examples)
    return sums[::2] - sums[1::2]


def _sums(fitted: Fit, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
    """What is said of each side of each example, one after another, summed over its loss tokens. Collective."""
    sides = [side for example in examples for side in example]
    said = of_each_token(
        {"said": fitted.said},
        [sequence for side in sides for sequence in side],
        micro_batch_tokens=fitted.config.learner.micro_batch_tokens,
        ranks=fitted.ranks,
    )["said"]
    starts = np.cumsum([0, *(count_loss_tokens(side) for side in sides[:-1])])
    return np.add.reduceat(said, starts)


def _backward(fitted: Fit, sequences: Sequence[TokenSequence], *, divisor: float) -> float:
    """Add up the gradient of -sum(weight * said) / divisor; return that sum, over all ranks, without the minus."""
    ranks, sums = fitted.ranks, []
    packs = micro_batches(
        sequences,
        max_tokens=fitted.config.learner.micro_batch_tokens,
        num_ranks=ranks.num_ranks,
        rank=ranks.rank,
    )
    for number, packed in enumerate(packs, start=1):
        expect_backward(fitted.model, last=number == len(packs))
        packed = packed.to(ranks.device)
        said_sum = (packed.advantages[packed.loss_mask] * fitted.said(packed)).sum()
        backward(-said_sum, ranks=ranks, divisor=divisor)
        sums.append(said_sum.detach())
    return summed_over_ranks({"said": torch.stack(sums).sum()})["said"]


def _write_held_out(fitted: Fit, measured: Material, writer: MetricsWriter | None) -> None:
    """Measure what is not trained on, and write it down at the step that was made last. Collective."""
    if not measured.examples:
        return
    metrics = Metrics()
    if fitted.goal == "sft":
        num_loss_tokens = sum(count_loss_tokens(side) for example in measured.examples for side in example)
        metrics.add("fit/held_out_loss", -float(_sums(fitted, measured.examples).sum()), num_loss_tokens)
    else:
        margins = _margins(fitted, measured)
        metrics.add("fit/held_out_loss", float(preference_loss(margins).sum()), len(margins))
        metrics.add("fit/held_out_accuracy", float((margins > 0).sum()), len(margins))
    if writer:
        _say(writer.write(fitted.progress.step, metrics), f"after step {fitted.progress.step}, held out")


def _add_margins(metrics: Metrics, margins: Margins) -> None:
    metrics.add("fit/loss", float(preference_loss(margins).sum()), len(margins))
    metrics.add("fit/accuracy", float((margins > 0).sum()), len(margins))
    metrics.add("fit/margin", float(margins.sum()), len(margins))


def _with_update(metrics: Metrics, update: Update, *, num_tokens: int) -> Metrics:
    metrics.add("optim/grad_norm", update.grad_norm)
    metrics.add("optim/lr", update.lr)
    metrics.add("optim/skipped", float(update.skipped))
    metrics.add("fit/tokens", num_tokens)
    return metrics


def _say(means: dict[str, float], when: str) -> None:
    shown = ("loss", "accuracy", "held_out_loss", "held_out_accuracy")
    values = (f"{name.replace('_', ' ')} {means[f'fit/{name}']:.3f}" for name in shown if f"fit/{name}" in means)
    log.info("%s: %s", when, ", ".join(values))


def _export(fitted: Fit, run_dir: RunDir) -> None:
    if isinstance(fitted.model, RewardModel):
        save_reward_model(fitted.model, run_dir.trained_model, ranks=fitted.ranks)
    else:
        save_hf(fitted.model, run_dir.trained_model, ranks=fitted.ranks)
        if fitted.config.model.lora.rank:
            save_adapters(fitted.model, run_dir.trained_adapters, ranks=fitted.ranks)


def _nothing() -> None:
    """No ledger waits for these checkpoints."""
