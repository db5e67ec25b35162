"""`slipstream runs`, and what the verbs say of a run whose server has ended with it."""

import json
import time
from pathlib import Path

import pytest
import redis

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.replay.records.ledger import ledger_of
from slipstream.replay.server.redis_server import start_private_server
from slipstream.tools.cli.cli import main
from slipstream.tools.see.runs import runs
from tests.common.process.test_headline import step
from tests.replay.buffer.every_verb import FACTS, MEMBER
from tests.tools.cli.verbs import Output

FINAL = {"sampled": 0.5, "greedy": 0.75, "num_tasks": 4, "sampled_in": {}, "greedy_in": {}}
SUMMARY = {
    "eval": {"final": FINAL},
    "eval_during": [FINAL | {"step": 2, "policy_version": 2}],
    "ledger": ledger_of({}).to_dict(),
    "lag": {"0": 32},
    "tokens_per_s": {"generated": 1.0, "trained": 1.0},
    "produced": None,
    "cost": {"dollars": 1.25, "dollars_per_million_tokens": None, "tokens_trained": 10, "wasted_tokens": {}}
    | {"shares": [], "dollars_per_hour": 0.0, "spot_dollars_per_hour": 0.0},
    "first_reward_s": 1.0,
    "wall_s": 2.0,
    "run_dir": "runs/NAME",
}


def make_run(root: Path, name: str, *, age_s: float, **summary: object) -> Config:
    """A run of two steps, whose last was `age_s` ago; finished if it has a summary."""
    config = load_config(None, [f"run.name={name}", f"run.root={root}", "learner.steps=12"])
    run_dir = RunDir(root, name)
    run_dir.create()
    run_dir.config.write_text(dump_config(config))
    records = [step(number, episodes=100, success=0.5) | {"time": time.time() - age_s} for number in (1, 2)]
    records.append({"step": 2, "time": time.time(), "eval/success_sampled": 0.625, "eval/num_tasks": 64})
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    if summary:
        run_dir.summary.write_text(json.dumps(summary))
        assert training(run_dir, lambda: 0) == 0
    return config


def with_own_server(config: Config) -> None:
    """Start and end the run's own server, as `up` does."""
    run_dir = RunDir(config.run.root, config.run.name)
    with start_private_server(run_dir.redis) as server:
        config.redis.url = server.url
        run_dir.config.write_text(dump_config(config))


def test_runs_are_listed_with_state_success_and_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "new", age_s=600)  # in minutes, so that the time of this test does not show
    make_run(tmp_path, "old", age_s=7200, **SUMMARY)
    assert runs(load_config(None, [f"run.root={tmp_path}"])) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "old finished 2 of 12 0.500 (0.40 to 0.60) 0.625 (0.50 to 0.73) $1.25 2 h ago",
        "new stopped 2 of 12 0.500 (0.40 to 0.60) 0.625 (0.50 to 0.73) 10 min ago",
    ]


def test_a_damaged_run_hides_no_other(tmp_path: Path, printed: Output) -> None:
    make_run(tmp_path, "whole", age_s=60)
    damaged = ("config", "summary", "halves", "deep", "huge", "folder")
    for name in (*damaged, "nothing"):
        make_run(tmp_path, name, age_s=60, **SUMMARY)
    RunDir(tmp_path, "config").config.write_text("run: [")
    RunDir(tmp_path, "summary").summary.write_text('{"cost": ')
    RunDir(tmp_path, "halves").summary.write_text('{"eval": {}}')
    RunDir(tmp_path, "deep").config.write_text("run: " + 3000 * "[" + 3000 * "]")
    for name, value in (("nothing", "null"), ("huge", 400 * "9")):
        with RunDir(tmp_path, name).metrics.open("a") as file:
            file.write(f'{{"step": 3, "trained/reward": 0, "time": {value}, "produced/success": {value}}}\n')
    (metrics := RunDir(tmp_path, "folder").metrics).unlink()
    metrics.mkdir()
    with RunDir(tmp_path, "whole").metrics.open("a") as file:
        file.write(f'{{"step": {400 * "9"}, "trained/reward": 0.5, "time": 0}}\n')
    lines = {line.split()[0]: line for line in printed("runs", f"run.root={tmp_path}").splitlines()}
    assert "stopped" in lines["whole"]
    assert "3 of 12" in lines["nothing"], "null is what was not finite, and no damage"
    for name in damaged:
        assert "unreadable" in lines[name]


def test_where_no_run_is_the_next_step_is_named(tmp_path: Path, printed: Output, refused: Output) -> None:
    next_step = f"there are no runs under {tmp_path}/; start one with `slipstream up`\n"
    assert printed("runs", f"run.root={tmp_path}") == next_step
    (tmp_path / "file").write_text("")
    assert f"`run.root` {tmp_path}/file is not a directory" in refused("runs", f"run.root={tmp_path}/file")


def test_a_run_without_a_server_is_not_taken_for_none(tmp_path: Path, refused: Output) -> None:
    make_run(tmp_path, "one", age_s=60)
    complaint = f"run 'one' in {tmp_path}/one has no Redis server: its `redis.url` is empty"
    assert complaint in refused("replay", "audit", "run.name=one", f"run.root={tmp_path}")
    assert f"no run 'two' under {tmp_path}/" in refused("replay", "audit", "run.name=two", f"run.root={tmp_path}")


def test_a_simulation_names_what_the_records_lack(tmp_path: Path, refused: Output) -> None:
    config, run_dir = make_run(tmp_path, "one", age_s=60), RunDir(tmp_path, "one")
    config.learner.steps = 30
    run_dir.config.write_text(dump_config(config))
    records = [{"step": number, "trained/reward": 0.5, "perf/step_s": None} for number in range(20)]
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    complaint = "metrics.jsonl: step 5 has no number perf/step_s, time/wait_s, "
    assert complaint in refused("simulate", "run.name=one", f"run.root={tmp_path}")


def test_top_shows_the_summary_of_a_finished_run(tmp_path: Path, printed: Output) -> None:
    with_own_server(make_run(tmp_path, "done", age_s=60, **SUMMARY))
    said = printed("top", "run.name=done", f"run.root={tmp_path}")
    assert "Slipstream: done has finished" in said and "ledger: balanced" in said
    assert "held-out success, by step: 2: 50.0%" in said


ALONE = {"fit": [], "rerun": ["run.rerun_of=one"]}
EXITS = {"finished": 0, "failed": 1, "stopped": 130}


@pytest.mark.parametrize("state", EXITS)
@pytest.mark.parametrize("kind", ALONE)
def test_a_run_that_trains_without_actors_has_a_state_for_each_verb(
    kind: str, state: str, tmp_path: Path, printed: Output, refused: Output
) -> None:
    run_dir = RunDir(tmp_path, "alone")
    make_run(tmp_path, "alone", age_s=60)
    config = load_config(str(run_dir.config), ALONE[kind])
    run_dir.config.write_text(dump_config(config))
    if kind == "fit":
        run_dir.fit.write_text("{}")
    assert training(run_dir, lambda: EXITS[state]) == EXITS[state]
    named = ["run.name=alone", f"run.root={tmp_path}"]
    for command in (["runs", named[1]], ["top", *named]):
        assert printed(*command).splitlines()[1].split()[:3] == ["alone", state, "2"]
    for verb in NEEDING[[*EXITS].index(state) :: len(EXITS)]:  # each for one state, as none looks at it
        assert "has no Redis server, as it trains without actors; `slipstream top alone`" in refused(*verb, *named)


NEEDING = [["scale"], ["replay", "audit"], ["replay", "groups"], ["replay", "failures"]]
ENDINGS = [(verb, SUMMARY) for verb in NEEDING] + [(verb, {}) for verb in [*NEEDING, ["top"]]]


@pytest.mark.parametrize(("verb", "summary"), ENDINGS)
def test_a_verb_that_needs_the_server_says_how_the_run_ended(
    tmp_path: Path, refused: Output, verb: list[str], summary: dict[str, object]
) -> None:
    with_own_server(make_run(tmp_path, "ended", age_s=60, **summary))
    said, ended = refused(*verb, "run.name=ended", f"run.root={tmp_path}"), "has finished" if summary else "was stopped"
    assert f"run 'ended' {ended}, and its Redis server ended with it; its archive answers" in said


def test_doctor_names_the_silent_server_of_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run_dir = make_run(tmp_path, "one", age_s=0), RunDir(tmp_path, "one")
    config.redis.url = "redis://127.0.0.1:1"
    run_dir.config.write_text(dump_config(config))
    assert training(run_dir, lambda: main(["doctor", "run.name=one", f"run.root={tmp_path}"])) == 1
    assert "run: FAULT: the run is alive, but redis://127.0.0.1:1 does not answer: " in capsys.readouterr().out


def test_doctor_says_of_a_run_what_is_wrong_with_it_whatever_state_it_is_in(
    redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(name: str) -> str:
        main(["doctor", f"run.name={name}", f"run.root={tmp_path}"])
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("  redis: ") and "MISSING" not in line for line in lines)
        return lines[-1].removeprefix("  run: ")

    assert found("none").endswith("/none does not exist; `slipstream up run.name=none` starts a run of that name")
    with_own_server(make_run(tmp_path, "done", age_s=60, **SUMMARY))
    assert found("done") == "finished; evaluate it with `slipstream eval run.name=done`"
    with_own_server(make_run(tmp_path, "stopped", age_s=60))
    assert found("stopped").startswith("stopped; neither side waits much: the learner was busy for 75%")
    assert found("stopped").endswith("; `slipstream up --resume stopped` continues it")
    log = RunDir(tmp_path, "stopped").log("learner")
    log.write_text("2026-01-01 00:00:00,000 INFO step 2\nslipstream learner: step 3: no complete batch within 600 s\n")
    assert found("stopped").startswith("FAULT: the learner ended with an error: step 3: no complete batch within 600 s")
    running = make_run(tmp_path, run_id, age_s=0)
    running.redis.url = redis_url
    RunDir(tmp_path, run_id).config.write_text(dump_config(running))
    fleet = Fleet(redis_client, run_id)
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.TRAINING)
    fleet.beat(MEMBER)

    def watched() -> int:
        busy = "neither side waits much: the learner was busy for 75% of the last 2 steps"
        assert found(run_id).startswith(busy)
        fleet.leave(MEMBER.name)
        assert found(run_id).startswith("FAULT: no actor is alive: none sends heartbeats")
        return 0

    assert training(RunDir(tmp_path, run_id), watched) == 0
