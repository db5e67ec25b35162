"""Training on recorded conversations: imitation (SFT), preferences (DPO), reward models, and process reward models.

Every gradient is that of a weighted sum of the model's outputs at the loss tokens. The result does not depend on the
number of micro-batches or ranks:

    sft      weight 1                                     output: log-probabilities
    dpo      weight beta * sigmoid(-margin), and minus    output: log-probabilities
             that on the side that is not preferred
    reward   weight sigmoid(-margin), and minus that      output: the score at the last token
             on the side that is not preferred
    prm      weight label - sigmoid(score)                output: the score at the last token of each labelled turn

A margin needs both sides of a pair, which may lie in different micro-batches. So a separate forward pass measures the
margins, or scores, before the backward pass.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import Metrics, MetricsWriter
from slipstream.common.process.output import write_json
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.reward_protocol import OUTCOME, PROCESS, Kind
from slipstream.learner.batch.examples import Example, Goal
from slipstream.learner.batch.pack import Packed, TokenSequence, count_loss_tokens
from slipstream.learner.checkpoint import checkpoint
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.checkpoint_writer import CheckpointWriter
from slipstream.learner.credit.measure import of_each_token
from slipstream.learner.fit.fit_identity import check_recorded, identity_of
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.learner.fit.fit_turns import calibration_table, held_out_metrics, label_metrics, labels_of
from slipstream.learner.learner import stop_requested
from slipstream.learner.model.export import save_adapters, save_hf
from slipstream.learner.model.gradient import apply_gradient, backward_over
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.learner.model.packed_model import ModelSettings, PackedModel, load_kind
from slipstream.learner.model.probe_score import check_export
from slipstream.learner.model.reward_model import RewardModel, save_reward_model
from slipstream.learner.objective.preference import Margins, dpo_margins, preference_loss, preference_slope
from slipstream.learner.objective.turn_labels import turn_slope
from slipstream.learner.ranks.hosts import check_alike
from slipstream.learner.ranks.ranks import Ranks, resolve_dtype
from slipstream.learner.step.step import StepModels

CALIBRATION = "calibration.json"  # of a process reward model, on the held-out rows

log = logging.getLogger(__name__)
OfTokens = npt.NDArray[np.float64]
Weights = Sequence[Sequence[float | OfTokens]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Examples, and for DPO the reference policy's difference between the two sides of each."""

    examples: Sequence[Example]
    reference: Margins | None = None

    def at(self, places: Sequence[int]) -> "Material":
        reference = None if self.reference is None else self.reference[list(places)]
        return Material(examples=[self.examples[place] for place in places], reference=reference)


@dataclass(kw_only=True, slots=True)
class Fit:
    """The state of a training run on recorded conversations."""

    goal: Goal
    config: Config
    options: FitOptions
    run_dir: RunDir
    ranks: Ranks
    models: StepModels  # of which the policy is fitted, which may be a reward model
    num_steps: int
    progress: Progress
    writer: MetricsWriter | None = None  # rank 0's, once training begins

    @property
    def model(self) -> PackedModel:
        return self.models.policy

    def outputs(self, packed: Packed) -> Tensor:
        """The model's output at each loss token: its log-probability, or a reward model's score after it."""
        found = self.model(packed)
        outputs: Tensor = found if isinstance(self.model, RewardModel) else found.logprobs
        return outputs


def fit(
    goal: Goal,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    *,
    config: Config,
    options: FitOptions,
    run_dir: RunDir,
    ranks: Ranks,
    shutdown: Shutdown,
) -> bool:
    """Fit a model to `examples` and export it; False if a stop was requested before the end.

    A run that was stopped continues from its checkpoint. Every rank passes all of the examples, in the same order.
    Raises ConfigError if `run_dir.fit` records that the run was started with other examples or settings.
    """
    identity = identity_of(goal, examples, options, config=config)
    check_alike(identity, ranks=ranks)
    check_recorded(run_dir.fit, identity)
    num_steps = options.epochs * -(-len(examples) // options.batch_rows)
    fitted = _load(goal, config, options, run_dir, ranks=ranks, num_steps=num_steps)
    sequences = (each for example in (*examples, *held_out) for side in example for each in side)
    if (largest := max(int(each.tokens.max()) for each in sequences)) >= fitted.model.vocab_size:
        raise ConfigError(
            f"`model.path` {config.model.path}: its tokenizer encodes the rows with the id {largest}, and the model "
            f"has only those below {fitted.model.vocab_size}; give it the tokenizer that it was trained with"
        )
    # Before a checkpoint is read: until then the model is the reference policy.
    training, validation = (_material(fitted, each) for each in (examples, held_out))
    checkpoints = CheckpointWriter(run_dir.checkpoints, ranks=ranks, keep=config.learner.keep_checkpoints)
    newest = checkpoints.newest(ranks=ranks)
    if newest is not None:
        fitted.progress = checkpoint.load(newest, fitted.models)
        log.info("resumed from %s", newest.name)
    if ranks.rank == 0:
        fitted.writer = MetricsWriter(run_dir, resume_step=fitted.progress.step, check=checkpoints.fence.check)
    try:
        finished = _train(fitted, training, validation, checkpoints, shutdown)
        checkpoints.wait()
    finally:
        checkpoints.close()
        if fitted.writer:
            fitted.writer.close()
    if finished:
        _export(fitted)
    return finished


def _load(goal: Goal, config: Config, options: FitOptions, run_dir: RunDir, *, ranks: Ranks, num_steps: int) -> Fit:
    torch.manual_seed(config.run.seed)
    resolve_dtype(config.model, ranks.device)
    model = load_kind(
        RewardModel if goal in ("reward", "prm") else PackedModel,
        config.model.path,
        ranks=ranks,
        settings=dataclasses.replace(ModelSettings.of(config), temperature=1.0),
    )
    optimizer = make_optimizer(model, config=config.optim)
    return Fit(
        goal=goal,
        config=config,
        options=options,
        run_dir=run_dir,
        ranks=ranks,
        models=StepModels(
            policy=model,
            optimizer=optimizer,
            schedule=make_schedule(optimizer, config=config.optim, num_steps=num_steps),
        ),
        num_steps=num_steps,
        progress=Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0),
    )


def _material(fitted: Fit, examples: Sequence[Example]) -> Material:
    bare = Material(examples=examples)
    if fitted.goal != "dpo" or not examples:
        return bare
    return Material(examples=examples, reference=_margins(fitted, bare))


def _train(
    fitted: Fit, training: Material, validation: Material, checkpoints: CheckpointWriter, shutdown: Shutdown
) -> bool:
    every, num_steps = fitted.config.learner.checkpoint_every, fitted.num_steps
    if fitted.progress.step == 0:
        _write_held_out(fitted, validation)
    while (step := fitted.progress.step) < num_steps:
        places, ends_epoch = _batch_at(
            step, len(training.examples), batch_rows=fitted.options.batch_rows, seed=fitted.config.run.seed
        )
        metrics = _step(fitted, training.at(places))
        if fitted.writer:
            _log_means(fitted.writer.write(step + 1, metrics), f"step {step + 1} of {num_steps}")
        if ends_epoch:
            _write_held_out(fitted, validation)
        stopping = stop_requested(shutdown, fitted.ranks)
        if stopping or (step + 1) % every == 0 or step + 1 == num_steps:
            checkpoints.begin(fitted.models, progress=fitted.progress)
        if stopping:
            break
    return fitted.progress.step == num_steps


def _batch_at(step: int, num_examples: int, *, batch_rows: int, seed: int) -> tuple[list[int], bool]:
    """The places of the next step's examples, and whether the step ends an epoch.

    Both follow from `step` and the seed, so that a resumed run continues with the examples it has not yet seen.
    """
    epoch, number = divmod(step, -(-num_examples // batch_rows))
    order = np.random.default_rng([seed, epoch]).permutation(num_examples)
    return order[number * batch_rows : (number + 1) * batch_rows].tolist(), (number + 1) * batch_rows >= num_examples


def _step(fitted: Fit, batch: Material) -> Metrics:
    metrics, weights, divisor = _weights(fitted, batch)
    sequences = _with_weights(batch.examples, weights)
    output_sum = _backward(fitted, sequences, divisor=divisor)
    models, max_grad_norm = fitted.models, fitted.config.optim.max_grad_norm
    update = apply_gradient(models.optimizer, models.schedule, max_grad_norm=max_grad_norm)
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    fitted.progress = msgspec.structs.replace(
        fitted.progress,
        step=fitted.progress.step + 1,
        policy_version=fitted.progress.policy_version + 1,
        tokens_trained=fitted.progress.tokens_trained + num_tokens,
    )
    if fitted.goal == "sft":
        metrics.add("fit/loss", -output_sum, divisor)
    metrics.add("optim/grad_norm", update.grad_norm)
    metrics.add("optim/lr", update.lr)
    metrics.add("optim/skipped", float(update.skipped))
    metrics.add("fit/tokens", num_tokens)
    return metrics


def _weights(fitted: Fit, batch: Material) -> tuple[Metrics, Weights, float]:
    """The metrics, the weights of each side of each example, and the divisor of all weights.

    A side has one weight, or one for each of its loss tokens.
    """
    if fitted.goal == "sft":
        num_loss_tokens = sum(count_loss_tokens(side) for example in batch.examples for side in example)
        return Metrics(), [(1.0,)] * len(batch.examples), num_loss_tokens
    if fitted.goal == "prm":
        scores, labels = _outputs(fitted, batch.examples), labels_of(batch.examples)
        of_sides = iter(np.split(turn_slope(scores, labels), _side_starts(batch.examples)[1:]))
        weights = [[next(of_sides) for _ in example] for example in batch.examples]
        return label_metrics(scores, labels), weights, len(labels)
    margins = _margins(fitted, batch)
    slopes = preference_slope(margins) * (fitted.options.beta if fitted.goal == "dpo" else 1.0)
    metrics = Metrics()
    metrics.add("fit/loss", float(preference_loss(margins).sum()), len(margins))
    metrics.add("fit/accuracy", float((margins > 0).sum()), len(margins))
    metrics.add("fit/margin", float(margins.sum()), len(margins))
    return metrics, [(slope, -slope) for slope in slopes.tolist()], len(batch.examples)


def _with_weights(examples: Sequence[Example], weights: Weights) -> list[TokenSequence]:
    return [
        dataclasses.replace(sequence, advantages=_at_loss_tokens(sequence, weight))
        for example, sides in zip(examples, weights, strict=True)
        for side, weight in zip(example, sides, strict=True)
        for sequence in side
    ]


def _at_loss_tokens(sequence: TokenSequence, weight: float | OfTokens) -> npt.NDArray[np.float32]:
    weights = np.zeros(sequence.num_tokens, dtype=np.float32)
    weights[sequence.loss_mask] = weight
    return weights


def _margins(fitted: Fit, pairs: Material) -> Margins:
    """The summed output of the preferred side, minus that of the other side, for each pair. Collective.

    With a reference it is DPO's margin.
    """
    sums: npt.NDArray[np.float64] = np.add.reduceat(_outputs(fitted, pairs.examples), _side_starts(pairs.examples))
    differences = sums[::2] - sums[1::2]
    if pairs.reference is None:
        return differences
    return dpo_margins(differences, reference=pairs.reference, beta=fitted.options.beta)


def _outputs(fitted: Fit, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
    """The output of each loss token, one side after the other. Collective."""
    return of_each_token(
        {"outputs": fitted.outputs},
        [sequence for example in examples for side in example for sequence in side],
        micro_batch_tokens=fitted.config.learner.micro_batch_tokens,
        ranks=fitted.ranks,
        share_prefixes=fitted.model.shares_prefixes,
    )["outputs"]


def _side_starts(examples: Sequence[Example]) -> npt.NDArray[np.int64]:
    """The number of loss tokens before each side."""
    sides = [side for example in examples for side in example]
    return np.cumsum([0, *(count_loss_tokens(side) for side in sides[:-1])])


def _backward(fitted: Fit, sequences: Sequence[TokenSequence], *, divisor: float) -> float:
    """Add up the gradient of -sum(weight * output) / divisor; return sum(weight * output) over all ranks."""
    return -backward_over(
        fitted.model,
        sequences,
        lambda packed: -(packed.advantages[packed.loss_positions] * fitted.outputs(packed)).sum(),
        max_tokens=fitted.config.learner.micro_batch_tokens,
        ranks=fitted.ranks,
        divisor=divisor,
    )


def _write_held_out(fitted: Fit, validation: Material) -> None:
    """Measure the loss on held-out examples, and record it at the last step. Collective.

    Of a process reward model, the calibration is written too.
    """
    if not validation.examples:
        return
    metrics = Metrics()
    if fitted.goal == "sft":
        logprobs = _outputs(fitted, validation.examples)
        metrics.add("fit/held_out_loss", -float(logprobs.sum()), len(logprobs))
    elif fitted.goal == "prm":
        scores, labels = _outputs(fitted, validation.examples), labels_of(validation.examples)
        metrics = held_out_metrics(scores, labels)
        if fitted.writer:
            table = {"step": fitted.progress.step, **calibration_table(scores, labels)}
            write_json(fitted.run_dir.path / CALIBRATION, table)
    else:
        margins = _margins(fitted, validation)
        metrics.add("fit/held_out_loss", float(preference_loss(margins).sum()), len(margins))
        metrics.add("fit/held_out_accuracy", float((margins > 0).sum()), len(margins))
    if fitted.writer:
        when = f"{len(validation.examples)} held-out examples after step {fitted.progress.step}"
        _log_means(fitted.writer.write(fitted.progress.step, metrics), when)


def _log_means(means: dict[str, float], when: str) -> None:
    shown = ("loss", "accuracy", "held_out_loss", "held_out_accuracy")
    values = (f"{name.replace('_', ' ')} {means[f'fit/{name}']:.3f}" for name in shown if f"fit/{name}" in means)
    log.info("%s: %s", when, ", ".join(values))


def _export(fitted: Fit) -> None:
    run_dir = fitted.run_dir
    if isinstance(fitted.model, RewardModel):
        kind: Kind = PROCESS if fitted.goal == "prm" else OUTCOME
        save_reward_model(fitted.model, run_dir.trained_model, kind=kind, ranks=fitted.ranks)
    else:
        save_hf(fitted.model, run_dir.trained_model, ranks=fitted.ranks)
        if fitted.config.model.lora.rank:
            save_adapters(fitted.model, run_dir.trained_adapters, ranks=fitted.ranks)
        check_export(fitted.model, run_dir.trained_model, ranks=fitted.ranks)
