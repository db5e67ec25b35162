"""A rank other than 0: it takes part in what is collective, and leaves the rest to rank 0."""

from collections.abc import Callable

from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.lead.evaluation import Evaluation
from slipstream.learner.publisher.publish import Publisher


class Follower:
    """Has the methods of `Connections` and `Lead` that every rank calls."""

    publisher: Publisher | None = None

    def _nothing(self, *_: object) -> None:
        """Only rank 0 does this."""

    check_epochs = give_up = train_from_here = reserve_version = archive = record_step = _nothing
    evaluate_once = evaluate_regularly = write_summary = finish = close = _nothing

    def with_fresh_version(self, progress: Progress) -> Progress:
        """`progress` as it is: rank 0 chooses the version, and shares it."""
        return progress

    def prepare_checkpoint(self, _: Progress) -> Callable[[], None]:
        return lambda: None

    def open_evaluation(self, _: Progress) -> Evaluation | None:
        return None

    def close_evaluation(self, *_: object) -> bool:
        return True
