"""The labels of turns in examples, and what is measured of a process reward model on them."""

import dataclasses
from collections.abc import Sequence

from slipstream.common.process.metrics import Metrics
from slipstream.learner.batch.examples import Example
from slipstream.learner.batch.pack import returns_of
from slipstream.learner.objective.turn_labels import Turns, calibration, calibration_error, probability, turn_loss


def labels_of(examples: Sequence[Example]) -> Turns:
    """The label of each loss token, one side after the other."""
    return returns_of([sequence for example in examples for side in example for sequence in side])


def label_metrics(scores: Turns, labels: Turns) -> Metrics:
    """The loss and the accuracy of a step."""
    metrics = Metrics()
    metrics.add("fit/loss", float(turn_loss(scores, labels).sum()), len(labels))
    metrics.add("fit/accuracy", _num_right(scores, labels), len(labels))
    return metrics


def held_out_metrics(scores: Turns, labels: Turns) -> Metrics:
    """How good the probabilities of held-out turns are."""
    found, metrics = probability(scores), Metrics()
    metrics.add("fit/held_out_loss", float(turn_loss(scores, labels).sum()), len(labels))
    metrics.add("fit/held_out_accuracy", _num_right(scores, labels), len(labels))
    metrics.add("fit/held_out_brier", float(((found - labels) ** 2).sum()), len(labels))
    metrics.add("fit/held_out_calibration_error", calibration_error(calibration(found, labels)))
    return metrics


def calibration_table(scores: Turns, labels: Turns) -> dict[str, object]:
    """The same numbers with the calibration in ten bins, for a file.

    `brier_of_the_mean_label` is what a model would have that gives every turn the same probability.
    """
    found = probability(scores)
    bins = calibration(found, labels)
    return {
        "turns": len(labels),
        "accuracy": _num_right(scores, labels) / len(labels),
        "brier": float(((found - labels) ** 2).mean()),
        "brier_of_the_mean_label": float(labels.var()),
        "calibration_error": calibration_error(bins),
        "bins": [dataclasses.asdict(each) for each in bins],
    }


def _num_right(scores: Turns, labels: Turns) -> float:
    """How many turns are put on the right side of 0.5."""
    return float(((scores >= 0) == (labels >= 0.5)).sum())
