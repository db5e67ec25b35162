"""What `slipstream top` and a terminal under `slipstream up` show of a run."""

import io
import json
import shutil
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import redis
from rich.console import Console, RenderableType

from slipstream.common.config.config import Config, RedisConfig, RunConfig
from slipstream.common.config.learner_config import LearnerConfig
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Flag
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import Fleet, MemberState, RunState
from slipstream.replay.run.observer import Observer
from slipstream.tools.run.up import LineReporter
from slipstream.tools.see.fleet_tables import actors_table
from slipstream.tools.see.top import view_once_described
from slipstream.tools.see.view import View, show
from tests.common.process.test_headline import REST, step
from tests.replay.buffer.every_verb import FACTS, MEMBER, RELAY

Record = TypeVar("Record", bound=msgspec.Struct)


def drawn(table: RenderableType, *, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


class Scene:
    """A run whose metrics and members a test writes, and its view."""

    def __init__(self, client: redis.Redis, run_id: str, root: Path) -> None:
        self.config = Config(run=RunConfig(name=run_id), learner=LearnerConfig(steps=12))
        self.fleet, self.dir = Fleet(client, run_id), RunDir(root, run_id)
        self.dir.create()
        self.view = View(client, self.dir, self.config)

    def train(self) -> None:
        self.fleet.describe_run(FACTS)
        self.fleet.set_run_state(RunState.TRAINING)
        self.fleet.beat(MEMBER)

    def write(self, *records: dict[str, Any]) -> None:
        self.dir.metrics.write_text("".join(json.dumps(REST | record) + "\n" for record in records))

    def rows(self, *records: dict[str, Any]) -> dict[str, str]:
        """The rows of the view with such records, by name, in a terminal of 100 columns."""
        self.write(*records)
        rows = [line.strip(" │").split("│") for line in drawn(self.view.render(), width=100).splitlines()]
        return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


@pytest.fixture
def scene(redis_client: redis.Redis, run_id: str, tmp_path: Path) -> Scene:
    return Scene(redis_client, run_id, tmp_path)


def test_reward_and_success_are_of_the_newest_finished_episodes_and_what_is_trained_is_named_so(scene: Scene) -> None:
    steps = [step(1, episodes=25, success=0.5), step(2, episodes=0, success=0.0)]
    rows = scene.rows(*steps, step(3, episodes=75, success=0.9, reward=0.75))
    assert rows["success"] == "0.800  ▁█" and rows["reward"] == "0.562  ▁█"
    assert rows["of"] == "the last 100 episodes; their success is 0.711 to 0.867 (95 %)"
    assert rows["trained on"] == "success 0.500, reward 0.500"


def test_a_run_without_finished_episodes_shows_the_rest(scene: Scene) -> None:
    rows = scene.rows(step(1, episodes=0, success=0.0))
    assert "success" not in rows and rows["step"] == "1 of 12"


def test_a_fleet_of_300_actors_is_one_line_for_each_kind_in_80_columns() -> None:
    fleet = [
        msgspec.structs.replace(
            MEMBER,
            name=f"a{number}",
            policy_version=40 + number % 5,
            instance_kind="spot" if number < 200 else "reserved",
            state=MemberState.DRAINING if number == 299 else MemberState.SERVING,
        )
        for number in range(300)
    ]
    lines = [line.split() for line in drawn(actors_table(fleet)).splitlines() if line.strip()]
    rows = [words for words in lines if words[0].isdigit()]
    assert [words[:6] for words in rows] == [
        ["200", "serving", "40-44", "1600", "of", "3200"],
        ["99", "serving", "40-44", "792", "of", "1584"],
        ["1", "draining", "44", "8", "of", "16"],
    ]
    assert rows[0][6:9] == ["2500", "25%", "10"]


def test_actors_with_long_names_that_run_on_the_same_are_a_line_each_in_80_columns() -> None:
    fleet = [msgspec.structs.replace(MEMBER, name=f"vm-27898-7141ba78-{n}", price_per_hour=0.5) for n in range(3)]
    lines = [line.strip() for line in drawn(actors_table(fleet)).splitlines() if line.strip()]
    assert [line.split()[0] for line in lines[2:5]] == [member.name for member in fleet]
    assert len(lines) == 6 and lines[5].startswith("runs on: ") and "spot 0.5 $/h" in lines[5]


def test_cost_and_time_left_are_of_the_newest_steps(scene: Scene) -> None:
    spent = {"fleet/cost_dollars": 1.5, "fleet/dollars_per_hour": 4.0, "fleet/dollars_per_million_tokens": 12.25}
    rows = scene.rows(step(1, episodes=100, success=0.5), step(3, episodes=100, success=0.5) | spent)
    assert rows["cost"] == "$1.50, $4.00 an hour now, $12.25 per million trained tokens"
    assert rows["time left"] == "about 0:04:30"  # nine more steps of 30 s


def test_a_machine_without_the_runs_directory_shows_the_step_that_the_learner_has_published(scene: Scene) -> None:
    shutil.rmtree(scene.dir.path)
    scene.config.learner.steps = 400
    scene.train()
    made = step(98, episodes=100, success=0.5) | REST | {"time": time.time(), "optim/grad_norm": float("nan")}
    scene.fleet.report_step(made)
    said = drawn(scene.view.render(), width=100)
    assert "98 of 400" in said and "lag" in said and "neither side waits much" in said
    scene.fleet.report_step({})
    assert "0 of 400" in drawn(scene.view.render()), "a learner that starts again has made none yet"


def test_steps_whose_gradient_is_not_finite_are_shown_with_what_is_wrong(scene: Scene) -> None:
    scene.train()
    spoiled = {"optim/grad_norm": None, "optim/skipped": 1.0, "mismatch/kl": None}
    rows = scene.rows(*(step(number, episodes=9, success=0.5) | spoiled for number in range(1, 6)))
    assert rows["mismatch"] == "KL nan, ESS 0.98"
    assert rows["FAULT"].startswith("every step is skipped")


def test_a_number_that_was_not_finite_hides_no_other(scene: Scene) -> None:
    collapsed = {"mismatch/kl": None, "mismatch/effective_sample_size": None}
    rows = scene.rows(step(3, episodes=50, success=0.5) | collapsed)
    assert rows["mismatch"] == "KL nan, ESS nan" and rows["lag"] == "1.00 optimizer steps, 2 at most"


def test_top_waits_for_a_run_that_no_learner_has_described_yet(
    redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(run=RunConfig(name=run_id, root=str(tmp_path)), redis=RedisConfig(url=redis_url))

    class Described(Flag):
        """Stands for Ctrl-C, which does not come: the learner describes the run while `top` waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            Fleet(redis_client, run_id).describe_run(FACTS)
            return False

    found = view_once_described(config, RunDir(tmp_path, run_id), Described())
    assert found is not None
    said = capsys.readouterr().out
    assert said.count("waiting for the learner") == 1
    interrupted = Flag()
    interrupted.set()
    config.run.name = f"{run_id}-other"
    assert view_once_described(config, RunDir(tmp_path, config.run.name), interrupted) is None


HOSTILE = ["[/x]", "[red]x[/]", "[link=file:///etc]", "\x1b[2J\x1b]0;title\x07", "\x9b31m", "\r\n", "\u202e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_members_say_is_shown_as_text(scene: Scene, redis_client: redis.Redis, text: str) -> None:
    """Every text of every record that a view reads."""

    def hostile(record: Record) -> Record:
        fields = msgspec.structs.asdict(record)
        words = {name: text for name, value in fields.items() if type(value) is str and name != "role"}
        return msgspec.structs.replace(record, **words)

    scene.fleet.beat(hostile(MEMBER))
    Bulletin(redis_client, scene.config.run.name).announce_relay(hostile(RELAY), ttl_s=60)
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=True, color_system=None)
    console.print(scene.view.render())
    shown = text.encode("unicode_escape").decode() if not text.isprintable() else text
    assert out.getvalue().count(shown) >= 3  # the actor's name and kind, the relay's name
    assert not any(character in out.getvalue() for character in "\x1b\x9b\r\u202e\x07")


@pytest.mark.parametrize("fault", [KeyError("trained/success"), ValueError("[/x] \x1b[2J"), redis.ConnectionError()])
def test_a_view_that_cannot_be_drawn_ends_nothing(fault: Exception) -> None:
    def update() -> None:
        raise fault

    out = io.StringIO()
    show(Console(file=out, width=200), update)
    assert "\x1b" not in out.getvalue()
    assert isinstance(fault, redis.RedisError) or "the run itself continues" in out.getvalue()


def test_a_record_without_numbers_is_told_and_passed(scene: Scene, redis_client: redis.Redis) -> None:
    records = [{"step": 1, "time": 1.0, "trained/reward": 0.5}, step(2, episodes=100, success=0.5) | {"time": 2.0}]
    out = io.StringIO()
    console = Console(file=out, width=300, markup=False)
    reporter = LineReporter(console, scene.dir, Observer(redis_client, scene.config))
    scene.write(*records)
    show(console, reporter.report)
    show(console, reporter.report)
    told, shown, *_ = out.getvalue().splitlines()
    assert told.startswith("cannot show the run: KeyError") and shown.startswith("step    2  ")
