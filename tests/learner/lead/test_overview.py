"""Each chart of the overview moves as docs/see.md says when a run fails in the way that it shows.

The episodes go through a real Redis, and the learner's own record writes what TensorBoard reads.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.common.records.trajectory import Outcome
from slipstream.learner.batch.batch import Batch
from slipstream.learner.checkpoint.checkpoint import Progress
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.lead.evaluation import Evaluation
from slipstream.learner.lead.overview import LINES, PINNED
from slipstream.learner.lead.run_record import RunRecord
from slipstream.learner.lead.tally import EvalResult, Tally
from slipstream.learner.publisher.publish import PublishStats
from slipstream.learner.supply.refusals import Refusals
from slipstream.replay.fleet.fleet import RunState
from tests.learner.lead.test_lead import Place, place
from tests.learner.lead.test_report import STEP, UNKNOWN
from tests.replay.buffer.every_verb import MEMBER
from tests.replay.records.attempts import ticket
from tests.whole.test_loop import points

__all__ = ["place"]  # a fixture

REPOSITORY = Path(__file__).parents[3]
STARTED_S = 1.7e9
BIAS = ("charts/reward", "charts/tokens", "charts/turns", "charts/seconds")


class Run:
    """A run whose learner records steps of one group of two, and which a fault then changes."""

    def __init__(self, place: Place) -> None:
        self.dir, self.buffer, self.connections = place.dir, place.views, place.join()
        self.buffer.learner.adopt_epoch(self.connections.epoch)
        named = {"tally": Tally(), "step": 0, "started_at_s": STARTED_S, "flops": UNKNOWN, "decode": str}
        fence = Fence(self.dir.checkpoints)
        self.record = RunRecord(self.connections, self.dir, fence, config=place.config, **named)
        self.progress = Progress(step=0, policy_version=20, highest_published=20, next_group_id=0, tokens_trained=0)
        self.second = 0
        self.connections.fleet.beat(MEMBER)
        self.connections.fleet.beat(msgspec.structs.replace(MEMBER, name="b"))

    def step(self, *, rewards: tuple[float, float] = (0.0, 1.0), dropped_returns: Sequence[float] = ()) -> None:
        """Play a group, train on it, and record the step, for which other groups were dropped."""
        number = self.progress.step
        lease = self.buffer.begin(ticket(number))
        self.buffer.earn(lease, *rewards, policy_version=20)
        groups = self.buffer.learner.claim(number + 1, 1, policy_version=20, max_lag=0)
        batch = Batch(groups=groups, num_dropped={}, dropped_returns=list(dropped_returns), next_group_id=number + 1)
        others = {"publish": PublishStats(), "refusals": Refusals(self.connections.fleet, self.connections.bulletin)}
        times_s = {"wait": 0.25, "forward": 0.75}
        self.record.write_step(batch, STEP, before=self.progress, times_s=times_s, **others)
        self.progress = msgspec.structs.replace(self.progress, step=number + 1)

    def look(self) -> None:
        """Let ten seconds pass in the charts by the clock."""
        self.second += 10
        self.record.watch._look(STARTED_S + self.second)

    def drawn(self) -> dict[tuple[str, str], list[float]]:
        """The values of each line of each pinned chart, by chart and line."""
        self.record.close()
        self.connections.give_up()
        runs = [path for path in self.dir.tensorboard.iterdir() if path.is_dir()]
        return {
            (tag, run.name): [value for _, value in drawn]
            for tag in PINNED
            for run in runs
            # `close` adds a point at the real time, long after these.
            if (drawn := [(step, value) for step, value in drawn_points(run, tag) if step <= 1000])
        }


def drawn_points(run: Path, tag: str) -> list[tuple[int, float]]:
    try:
        return points(run, tag)
    except KeyError:
        return []


@pytest.fixture
def run(place: Place) -> Run:
    return Run(place)


def test_in_a_run_in_order_no_chart_alarms(run: Run) -> None:
    for _ in range(3):
        run.step()
        run.look()
    drawn = run.drawn()
    assert drawn["charts/success", "produced"] == drawn["charts/success", "trained"] == [0.5] * 3
    assert drawn["charts/reward", "produced"] == [0.5] * 3
    assert drawn["charts/tokens", "produced"] == drawn["charts/tokens", "trained"] == [4.0] * 3
    assert drawn["optim/entropy", "learner"] == [STEP.entropy] * 3
    assert drawn["lag/mean", "learner"] == [0.0] * 3
    assert drawn["perf/learner_busy", "learner"] == [0.75] * 3
    assert drawn["fleet/num_actors", "fleet"] == [2.0] * 3
    assert drawn["replay/total_failed", "fleet"] == [0.0] * 3
    assert drawn["fleet/dollars_per_million_tokens", "fleet"][0] > 0


def test_episodes_of_a_step_are_there_as_text(run: Run) -> None:
    run.step(rewards=(0.0, 1.0))
    run.record.close()
    learner = EventAccumulator(str(run.dir.tensorboard / "learner")).Reload()
    assert set(learner.PluginTagToContent("text")) == {"trained/best", "trained/worst", "trained/random"}
    (best,), (worst,) = (learner.Tensors(f"trained/{which}") for which in ("best", "worst"))
    assert b"return 1, success, 1 turns" in best.tensor_proto.string_val[0]
    assert b"return 0, no success" in worst.tensor_proto.string_val[0]
    rows = [json.loads(line) for line in run.dir.samples.read_text().splitlines()]
    shown = [(row["which"], row["return"], row["success"]) for row in rows[:2]]
    assert shown == [("best", 1, True), ("worst", 0, False)]
    assert [(row["step"], row["num_turns"]) for row in rows] == [(1, 1)] * 3


def test_the_log_of_an_evaluation_says_of_how_many_tasks_it_is(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    result = EvalResult(sampled=0.5, greedy=0.25, num_tasks=8, sampled_in={}, greedy_in={})
    evaluation = Mock(spec=Evaluation, step=1, num_mixed=0, lasted_s=2.0)
    with caplog.at_level(logging.INFO):
        run.record.write_evaluation(evaluation, result, "final")
    assert "evaluation final: success 0.500 (0.22 to 0.78) sampled, 0.250 greedy, of 8 tasks" in caplog.messages


def test_actors_that_die_leave_the_chart_of_actors_while_no_step_is_made(run: Run) -> None:
    run.step()
    run.look()
    run.connections.fleet.leave("a")
    run.look()
    run.connections.fleet.leave("b")
    run.look()
    drawn = run.drawn()
    assert drawn["fleet/num_actors", "fleet"] == [2.0, 1.0, 0.0]
    assert len(drawn["perf/learner_busy", "learner"]) == 1


def test_the_diagnosis_is_a_text_that_changes_with_its_cause_and_a_lasting_fault_is_logged(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.connections.fleet.set_run_state(RunState.TRAINING)
    run.step()
    run.look()
    run.look()
    assert run.record.watch.found and not run.record.watch.found.is_fault
    for name in ("a", "b"):
        run.connections.fleet.leave(name)
    run.look()
    assert run.record.watch.found.cause == "no actor is alive" and not caplog.messages
    for _ in range(9):
        run.look()
    (logged,) = [text for text in caplog.messages if "FAULT" in text]
    assert logged.startswith("FAULT: no actor is alive: none sends")
    run.connections.fleet.beat(MEMBER)
    run.look()
    assert "no longer: no actor is alive" in caplog.messages
    run.record.close()
    fleet = EventAccumulator(str(run.dir.tensorboard / "fleet")).Reload()
    written = [(text.step, text.tensor_proto.string_val[0].decode()) for text in fleet.Tensors("diagnosis")]
    (_, first), (_, fault), (_, last) = [each for each in written if each[0] <= 1000]
    assert "no fault: neither side waits much" in first and "no fault: neither side waits much" in last
    assert fault.startswith("    FAULT: no actor is alive\n    evidence: none sends heartbeats")
    assert "next step: start `slipstream actors`" in fault


def test_an_environment_that_raises_shows_while_no_step_is_made(run: Run) -> None:
    run.step()
    run.look()
    for group_id in (100, 101):
        lease = run.buffer.begin(ticket(group_id))
        for attempt in (0, 1):
            run.buffer.actor.fail(lease, 0, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="it broke")
        run.look()
    assert run.drawn()["replay/total_failed", "fleet"] == [0.0, 2.0, 4.0]


def test_rewards_of_what_is_produced_trained_and_dropped_are_lines_of_one_chart(run: Run) -> None:
    run.step(rewards=(0.0, 1.0), dropped_returns=(0.25, 0.25, 0.75, 0.75))
    drawn = run.drawn()
    assert [drawn["charts/reward", line] for line in ("produced", "trained", "dropped")] == [[0.5]] * 3
    by_chart = {chart: {place.run for place in LINES.values() if place.tag == chart} for chart in BIAS}
    assert all(lines == {"produced", "trained", "dropped"} for lines in by_chart.values())


def test_the_page_says_which_chart_answers_which_question() -> None:
    page = (REPOSITORY / "docs" / "see.md").read_text()
    for tag in PINNED:
        assert f"`{tag}`" in page, tag
    assert {place.tag for place in LINES.values()} >= {tag for tag in PINNED if tag.startswith("charts/")}
