"""`slipstream scale --prices`: what it decides from a run's records, and what stays as it is when it cannot."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.replay.fleet.fleet import Fleet, Member, MemberState, RunState
from slipstream.tools.launch.follow import ended_hosts, follow, read_log
from slipstream.tools.launch.hosts import experience
from slipstream.tools.launch.market import Experience, Place
from slipstream.tools.launch.market_options import MarketOptions
from slipstream.tools.launch.scale import scale
from tests.replay.buffer.every_verb import FACTS, MEMBER

DEADLINE_S = 60.0
A, B = Place("spot", "a"), Place("spot", "b")
PRICES = "spot a 0.40\nspot b 0.20\n"


def host(name: str, zone: str, **changes: object) -> Member:
    return msgspec.structs.replace(MEMBER, name=f"{name}-0", host=name, zone=zone, **changes)


@pytest.fixture
def config(redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path) -> Config:
    """Of a run that trains with two hosts in zone a, and for which four actors are advised."""
    fleet = Fleet(redis_client, run_id)
    fleet.describe_run(FACTS)
    fleet.set_run_state(RunState.TRAINING)
    for name in ("one", "two"):
        fleet.beat(host(name, "a"))
    run_dir = RunDir(tmp_path, run_id)
    run_dir.create()
    run_dir.metrics.write_text(json.dumps({"step": 1, "time": time.time(), "fleet/advised_actors": 4}) + "\n")
    (tmp_path / "prices").write_text(PRICES)
    return load_config(None, [f"run.name={run_id}", f"run.root={tmp_path}", f"redis.url={redis_url}", "actors.count=1"])


def options(config: Config, **changes: object) -> MarketOptions:
    root = Path(config.run.root)
    given: dict[str, object] = {
        "prices": str(root / "prices"),
        "budget": 10.0,
        "command": f"sh -c 'echo {{kind}} {{zone}} {{want}} >> {root}/orders'",
        **changes,
    }
    return MarketOptions(**given)  # type: ignore[arg-type]


def orders(config: Config) -> list[str]:
    path = Path(config.run.root) / "orders"
    return path.read_text().splitlines() if path.exists() else []


def test_the_command_is_run_for_each_market_that_changes_and_the_reason_is_logged(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(config, options=options(config, max_change=3), dry_run=True) == 0
    printed = capsys.readouterr().out
    assert "4 hosts advised, 2 run; spot a 2 -> 0 (0.400 $/h" in printed and "spot b 0 -> 3 (0.200 $/h" in printed
    assert printed.count("would run sh -c") == 2 and orders(config) == []
    assert follow(config, options=options(config, max_change=3), dry_run=False) == 0
    assert orders(config) == ["spot a 0", "spot b 3"]
    log = read_log(RunDir(config.run.root, config.run.name).path / "scale.jsonl")
    assert log == [{"place": A, "have": 2, "want": 0}, {"place": B, "have": 0, "want": 3}]


def test_what_was_ordered_and_has_not_joined_is_taken_back(config: Config) -> None:
    follow(config, options=options(config, max_change=4), dry_run=False)
    (Path(config.run.root) / "prices").write_text("spot a 0.10\nspot b 0.20\n")
    follow(config, options=options(config, max_change=4), dry_run=False)
    assert orders(config) == ["spot a 0", "spot b 4", "spot a 4", "spot b 0"]


def test_nothing_changes_while_prices_or_the_run_cannot_be_read(config: Config, redis_client: redis.Redis) -> None:
    path, fleet = Path(config.run.root) / "prices", Fleet(redis_client, config.run.name)
    for text in ("", "garbage\n", "spot b 0.20\nspot a 0.4", "spot b nan\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="nothing was changed"):
            follow(config, options=options(config), dry_run=False)
    path.unlink()
    with pytest.raises(ConfigError, match=r"No such file or directory.*nothing was changed"):
        follow(config, options=options(config), dry_run=False)
    path.write_text(PRICES)
    for state in (RunState.STARTING, RunState.FAILED):
        fleet.set_run_state(state)
        with pytest.raises(ConfigError, match=f"the run's state is '{state.value}'"):
            follow(config, options=options(config), dry_run=False)
    fleet.set_run_state(RunState.TRAINING)
    RunDir(config.run.root, config.run.name).metrics.unlink()
    with pytest.raises(ConfigError, match="no advised number of actors yet"):
        follow(config, options=options(config), dry_run=False)
    assert orders(config) == []


def test_a_market_that_is_missing_among_the_prices_keeps_its_hosts(config: Config) -> None:
    (Path(config.run.root) / "prices").write_text("spot b 0.20\n")
    follow(config, options=options(config), dry_run=False)
    assert orders(config) == ["spot b 2"]


def test_a_loop_outlives_garbage_and_ends_with_the_run(
    config: Config, redis_client: redis.Redis, redis_url: str
) -> None:
    path = Path(config.run.root) / "prices"
    path.unlink()
    arguments = ["scale", f"run.name={config.run.name}", f"run.root={config.run.root}", f"redis.url={redis_url}"]
    given = options(config)
    arguments += ["actors.count=1", "--prices", given.prices, "--budget=10", "--command", given.command, "--every=0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "slipstream.tools.cli.cli", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        assert "nothing is changed: prices of" in process.stdout.readline()
        path.write_text("half a li")
        assert "the last line does not end" in process.stdout.readline()
        path.with_name("new").write_text(PRICES)
        path.with_name("new").rename(path)
        assert "spot a 2 -> 0" in process.stdout.readline()
        Fleet(redis_client, config.run.name).set_run_state(RunState.FINISHED)
        rest = process.stdout.read()
        assert process.wait() == 0 and "the run has finished" in rest
    deadline.cancel()
    assert orders(config)[:2] == ["spot a 0", "spot b 2"]


def test_a_command_that_fails_is_reported_and_not_logged_as_done(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(config, options=options(config, command="false {zone} {want}"), dry_run=False) == 1
    assert "the command for spot a ended with code 1" in capsys.readouterr().out
    assert follow(config, options=options(config, command="/nonexistent {zone} {want}"), dry_run=False) == 1
    assert read_log(RunDir(config.run.root, config.run.name).path / "scale.jsonl") == []


def test_of_a_decision_that_fails_half_way_what_was_done_is_logged_and_the_rest_is_tried_again(config: Config) -> None:
    """Otherwise the hosts that it ended would count as lost."""
    root, log = Path(config.run.root), RunDir(config.run.root, config.run.name).path / "scale.jsonl"
    command = (
        f"sh -c 'test {{zone}} = a || test -e {root}/up || exit 1; echo {{kind}} {{zone}} {{want}} >> {root}/orders'"
    )
    assert follow(config, options=options(config, command=command, max_change=3), dry_run=False) == 1
    assert orders(config) == ["spot a 0"]
    assert read_log(log) == [{"place": A, "have": 2, "want": 0}] and ended_hosts(read_log(log)) == {A: 2}
    (root / "up").touch()
    assert follow(config, options=options(config, command=command, max_change=3), dry_run=False) == 0
    assert orders(config) == ["spot a 0", "spot a 0", "spot b 3"]
    assert ended_hosts(read_log(log)) == {A: 2, B: 0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prices_command": "cat x"}, "both --prices and --prices-command"),
        ({"budget": 0.0}, "--budget.*> 0"),
        ({"budget": float("nan")}, "--budget"),
        ({"budget": float("inf")}, "--budget"),
        ({"min_hosts": -1}, "--min-hosts"),
        ({"min_hosts": 9, "max_hosts": 8}, "--max-hosts"),
        ({"max_change": 0}, "--max-change"),
        ({"every": -1.0}, "--every"),
        ({"losses_per_hour": float("nan")}, "--losses-per-hour"),
        ({"command": "run {zone}"}, "{want}"),
        ({"command": "run {zone} {want} {have}"}, "no other placeholders"),
        ({"command": "run {want} {"}, "--command cannot be read"),
        ({"command": "run {want} 'x"}, "--command cannot be read"),
        ({"command": "run {want!r} {}"}, "no other placeholders"),
    ],
)
def test_options_without_a_meaning_are_refused(config: Config, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        options(config, **changes)


def test_options_that_contradict_each_other_are_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="--budget, --max-change has no effect without --prices"):
        MarketOptions(budget=1.0, max_change=3)
    with pytest.raises(ConfigError, match="got --to or --on with prices"):
        scale(config, to=3, host="", on=None, dry_run=True, options=options(config))
    with pytest.raises(ConfigError, match="--command is empty"):
        follow(config, options=options(config, command=""), dry_run=False)
    with pytest.raises(ConfigError, match="the same for several of the 2 markets"):
        follow(config, options=options(config, command="run {kind} {want}"), dry_run=False)


def test_hosts_that_left_while_the_run_went_on_were_lost_and_those_that_scale_ended_were_not() -> None:
    """Three hosts served for an hour in zone a; two ended a minute or more before a step; one is alive.

    The lost ones kept 3 of 4 tokens: each lost a quarter of its actor's hour.
    """
    tokens = {"started_at_s": 0.0, "served_s": 3600.0, "generated_tokens": 400, "kept_tokens": 300}
    everyone = [host(name, "a", **tokens) for name in ("one", "two", "three")]
    steps = [3590.0, 3600.0 + 61]
    seen = experience(everyone, alive=everyone[:1], step_times=steps, ended={})
    assert seen == {A: Experience(num_lost=2, host_hours=3.0, lost_work_hours=0.5)}
    one = experience(everyone, alive=everyone[:1], step_times=steps, ended={A: 1, B: 7})
    assert one == {A: Experience(num_lost=1, host_hours=3.0, lost_work_hours=0.25)}
    for stopped in ([3590.0], [3590.0, 3630.0], [3590.0, 3600.0 + 7200]):  # the run ended, or was stopped, with them
        assert experience(everyone, alive=[], step_times=stopped, ended={})[A].num_lost == 0


def test_an_actor_that_crashed_or_was_ended_by_its_supervisor_is_no_lost_host() -> None:
    first, second = (msgspec.structs.replace(MEMBER, name=f"one-7-{n}", zone="a", started_at_s=0.0) for n in (0, 1))
    assert experience([first, second], alive=[second], step_times=[200.0], ended={})[A].num_lost == 0
    draining = msgspec.structs.replace(second, state=MemberState.DRAINING)
    assert experience([first, draining], alive=[draining], step_times=[200.0], ended={})[A].num_lost == 0


def test_a_host_that_drains_for_several_decisions_was_ended_once(tmp_path: Path) -> None:
    log = tmp_path / "scale.jsonl"
    rows = [
        {"kind": "spot", "zone": "a", "have": have, "want": want} for have, want in ((3, 2), (3, 2), (2, 4), (2, 1))
    ]
    lines = [json.dumps({"hosts": [row]}) for row in rows]
    log.write_text(
        "\n".join([lines[0], "garbage", lines[1], '{"hosts": 3}', *lines[2:], '{"hosts": [{"kind": 1}]}', "["])
    )
    assert ended_hosts(read_log(log)) == {A: 2}  # 3 to 2, then 2 of the 4 that never came to 1
    assert read_log(tmp_path / "none") == []
