"""`slipstream road`: stages in order, each from the model of the one before, resumed where it was stopped.

Stand-ins take the place of the verbs: `make road` walks a real road.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.common.process.config_error import ConfigError
from slipstream.tools.cli.cli import main
from slipstream.tools.road.road import walk_road
from slipstream.tools.road.road_file import check_road, read_road
from slipstream.tools.road.road_report import Success, gain

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 120.0
WALK = (sys.executable, "-m", "tests.tools.road.stand_in_road")
EXPERT = {"name": "expert", "kind": "collect", "options": {"num_tasks": 5, "expert": True}}
IMITATE = {"name": "imitate", "kind": "sft", "options": {"data": "expert"}, "set": {"optim": {"lr": 0.25}}}
PREFER = {"name": "prefer", "kind": "dpo", "options": {"data": "expert", "beta": 1}}
JUDGE = {"name": "judge", "kind": "reward", "options": {"data": "best"}}
BEST = {"name": "best", "kind": "rejection", "options": {"num_tasks": 4, "best_of_group": 2, "min_return": 1}}
EXPLORE = {"name": "explore", "kind": "rl", "set": {"objective": {"reward_model": "judge"}, "learner": {"steps": 3}}}


LABEL = {"name": "label", "kind": "collect", "options": {"num_tasks": 2, "completions": 3}}
PROCESS = {"name": "process", "kind": "prm", "options": {"data": "label", "hard": True}}
GUIDED = {
    "name": "guided",
    "kind": "rejection",
    "options": {"num_tasks": 4, "search": "tree_of_thoughts", "reward_model": "process", "min_return": 1},
}
BY_TURN = {
    "name": "by-turn",
    "kind": "rl",
    "set": {"objective": {"reward_model": "process", "allocation": "per_turn"}, "learner": {"steps": 3}},
}


def written(folder: Path, *stages: object, **more: object) -> str:
    shared = {"run": {"name": "r", "root": str(folder)}, "env": {"name": "shop"}, "eval": {"num_tasks": 100}}
    path = folder / "road.yaml"
    path.write_text(yaml.safe_dump({"set": shared, "stages": list(stages), **more}))
    return str(path)


def walked(folder: Path, *stages: object, overrides: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*WALK, written(folder, *stages), *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=REPOSITORY)


def calls(folder: Path) -> list[str]:
    """The calls since the last look."""
    path = folder / "calls.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.removeprefix("r-") for line in lines]


def recorded(folder: Path) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((folder / "r" / "road.json").read_text())["stages"]
    return stages


def wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} has not appeared"
        time.sleep(0.02)


def test_each_stage_begins_with_the_model_of_the_one_before(tmp_path: Path) -> None:
    done = walked(tmp_path, EXPERT, IMITATE, PREFER, BEST, JUDGE, EXPLORE)
    assert done.returncode == 0, done.stderr
    assert calls(tmp_path) == [
        "base: prepare",
        "r: eval",
        "expert: collect",
        "imitate: sft",
        "r: eval",
        "prefer: dpo",
        "r: eval",
        "best: collect",
        "best: sft",
        "r: eval",
        "judge: reward",
        "explore: up",
        "r: eval",
    ]
    models = {name: stage["model"] for name, stage in recorded(tmp_path).items()}
    assert (Path(models["explore"]) / "trained_by").read_text() == "base r-imitate r-prefer r-best r-explore"
    assert (models["expert"], models["judge"]) == ("", "")
    assert (
        tmp_path / "r-judge" / "trained_model" / "trained_by"
    ).read_text() == "base r-imitate r-prefer r-best r-judge"
    assert json.loads((tmp_path / "r" / "best.jsonl").read_text())["by"] == ["base", "r-imitate", "r-prefer"]
    explore = read_road(str(tmp_path / "road.yaml"), []).stages[-1].config
    assert explore.objective.reward_model == str(tmp_path / "r-judge" / "trained_model")
    assert (explore.learner.steps, explore.eval.num_tasks) == (3, 0)

    table = (tmp_path / "r" / "road.md").read_text().splitlines()
    assert table[4].startswith("| stage | kind | held-out success | gain |")
    assert table[6].startswith("| base | base | 20.0% (13% to 29%) |  | 50.0% (40% to 60%) |")
    assert table[8].startswith("| imitate | sft | 40.0% (31% to 50%) | +20.0 points (+7 to +32) |")
    assert table[8].endswith("|  | 30 | held-out loss 2.00 to 1.00 |")
    assert table[10].startswith("| best | rejection | 80.0% (71% to 87%) | +20.0 points (+7 to +32) |")
    assert table[10].endswith("| 7 | 30 | 1 successes in 1 episodes, held-out loss 2.00 to 1.00 |")
    assert table[11].startswith("| judge | reward |  |  |  |")
    assert table[12].endswith("| 55 | 50 | 3 steps |")
    assert "imitate" in done.stdout and "+20.0 points" in done.stdout

    again = walked(tmp_path, EXPERT, IMITATE, PREFER, BEST, JUDGE, EXPLORE)
    assert again.returncode == 0 and calls(tmp_path) == []
    assert "best" in again.stdout


def test_the_teacher_of_a_stage_is_a_folder_or_an_earlier_stage_that_trains(tmp_path: Path) -> None:
    def distil(teacher: str) -> dict[str, Any]:
        objective = {"advantage": "distillation", "reference_model": teacher, "kl_place": "reward", "kl_coefficient": 1}
        return {"name": "distil", "kind": "rl", "set": {"objective": objective}}

    read = read_road(written(tmp_path, EXPERT, IMITATE, distil("imitate")), [])
    check_road(read, first=0)
    assert read.stages[-1].config.objective.reference_model == str(tmp_path / "r-imitate" / "trained_model")
    missing = read_road(written(tmp_path, EXPERT, IMITATE, distil("models/none")), [])
    with pytest.raises(ConfigError, match=r"stage 'distil': `objective.reference_model` must be a folder.*\(imitate"):
        check_road(missing, first=0)


def test_a_process_reward_model_is_trained_on_labels_and_guides_later_stages(tmp_path: Path) -> None:
    done = walked(tmp_path, LABEL, PROCESS, GUIDED, BY_TURN)
    assert done.returncode == 0, done.stderr
    stages = ["label: collect", "process: prm", "guided: collect", "guided: sft", "r: eval", "by-turn: up", "r: eval"]
    assert calls(tmp_path) == ["base: prepare", "r: eval", *stages]
    model = str(tmp_path / "r-process" / "trained_model")
    road = read_road(str(tmp_path / "road.yaml"), []).stages
    assert road[2].collect is not None and road[2].collect.reward_model == model
    assert road[3].config.objective.reward_model == model
    check_road(read_road(str(tmp_path / "road.yaml"), []), first=0)
    with pytest.raises(
        ConfigError, match=r"`reward_model` must be a folder, or an earlier stage .* \(none\), got 'process'"
    ):
        check_road(read_road(written(tmp_path, GUIDED), []), first=0)
    served = GUIDED | {"options": GUIDED["options"] | {"reward_model": "http://127.0.0.1:7366"}}  # type: ignore[operator]
    check_road(read_road(written(tmp_path, served), []), first=0)


def test_a_stage_that_fails_is_named_and_only_what_is_missing_runs_again(tmp_path: Path) -> None:
    (tmp_path / "fail-r-best").write_text("1")
    failed = walked(tmp_path, BEST)
    assert failed.returncode == 1
    assert "slipstream road: stage 'best' ended with code 1" in failed.stderr and "the disk is full" in failed.stderr
    assert "best did not finish; the same command continues it" in failed.stderr
    assert calls(tmp_path) == ["base: prepare", "r: eval", "best: collect", "best: sft"]
    (tmp_path / "fail-r-best").unlink()
    assert walked(tmp_path, BEST).returncode == 0
    assert calls(tmp_path) == ["best: sft", "r: eval"]


@pytest.mark.parametrize(
    ("number", "stages", "first", "then"),
    [
        (signal.SIGKILL, [{"name": "go", "kind": "rl"}], ["go: up"], ["go: up --resume"]),
        (signal.SIGTERM, [EXPERT, IMITATE | {"name": "go"}], ["expert: collect", "go: sft"], ["go: sft"]),
    ],
)
def test_a_road_that_was_stopped_continues_the_run_of_its_stage(
    number: signal.Signals, stages: list[object], first: list[str], then: list[str], tmp_path: Path
) -> None:
    hang = tmp_path / "hang-r-go"
    hang.touch()
    process = subprocess.Popen([*WALK, written(tmp_path, *stages)], cwd=REPOSITORY)
    wait_for(tmp_path / "r-go" / "config.yaml")
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    assert calls(tmp_path) == ["base: prepare", "r: eval", *first]
    hang.unlink()
    assert walked(tmp_path, *stages).returncode == 0
    assert calls(tmp_path) == [*then, "r: eval"]
    assert recorded(tmp_path)["go"]["finished"] and recorded(tmp_path)["go"]["seconds"] > 0


def test_a_stage_that_has_begun_keeps_its_settings_and_later_ones_may_change(tmp_path: Path) -> None:
    (tmp_path / "fail-r-prefer").write_text("2")
    assert walked(tmp_path, EXPERT, IMITATE, PREFER).returncode == 2
    calls(tmp_path)
    hotter = IMITATE | {"set": {"optim": {"lr": 0.5}}}
    for stages, change in (
        ([EXPERT, hotter, PREFER], "stage 'imitate' has begun with other settings: optim.lr: 0.25 -> 0.5"),
        ([EXPERT, IMITATE, PREFER | {"options": {"data": "expert"}}], "stage 'prefer' has begun .* options: "),
        ([EXPERT, PREFER], "stage 'prefer' has begun with other settings: model.path: "),
    ):
        with pytest.raises(ConfigError, match=f"{change}.*; choose another `run.name`, or undo the change"):
            walk_road(read_road(written(tmp_path, *stages), []))
    assert calls(tmp_path) == []
    (tmp_path / "fail-r-prefer").unlink()
    assert walked(tmp_path, EXPERT, IMITATE, PREFER, BEST).returncode == 0
    assert calls(tmp_path) == ["prefer: dpo", "r: eval", "best: collect", "best: sft", "r: eval"]


def test_a_run_of_that_name_which_is_not_the_roads_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r-best").mkdir()
    (tmp_path / "r-best" / "config.yaml").write_text("run: {name: r-best}\n")
    with pytest.raises(ConfigError, match=f"stage 'best': {tmp_path}/r-best exists and does not belong to this road"):
        walk_road(read_road(written(tmp_path, BEST), []))
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ([], "`stages` must be a list of at least one stage"),
        ([5], "stage 1 must be a mapping with name, kind, options, set, got 5"),
        ([BEST | {"sets": {}}], "stage 1: unknown key `sets`; a stage has name, kind, options, set"),
        ([EXPERT, BEST | {"name": "expert"}], "stage 'expert': `name` must be .* none of base, expert"),
        ([BEST | {"name": "a b"}], "stage 'a b': `name` must be lower-case letters"),
        ([BEST | {"kind": "ppo"}], "stage 'best': `kind` must be one of collect, .*, got 'ppo'"),
        ([BEST | {"options": 3}], "stage 'best': `options` must be a mapping"),
        ([BEST | {"options": {"min_retrun": 1}}], "stage 'best': unknown option `min_retrun`"),
        ([IMITATE | {"options": {"epoch": 1}}], "stage 'imitate': unknown option `epoch`; did you mean `epochs`?"),
        (
            [BEST | {"options": {"min_return": True}}],
            "stage 'best': option `min_return` must be of type float, got True",
        ),
        ([BEST | {"options": {"epochs": 0}}], "stage 'best': `--epochs` must be >= 1, got 0"),
        ([BEST | {"options": {"data": "x.jsonl"}}], "stage 'best': `data` is what the stage itself collects"),
        ([EXPLORE | {"options": {"epochs": 1}}], "stage 'explore': `options` must be empty for the kind rl"),
        ([IMITATE], r"stage 'imitate': `data` must be a file .* collects \(none\), got 'expert'"),
        ([IMITATE, EXPERT], "stage 'imitate': `data` must be a file"),
        ([BEST | {"set": {"optim": {"lrr": 1}}}], "stage 'best': unknown config key `optim.lrr`; did you mean"),
        ([BEST | {"set": {"model": {"path": "x"}}}], "stage 'best': `model.path` is the model of the stage before"),
        ([BEST | {"set": 3}], "`set` must be a mapping of sections to their keys, got 3"),
        ([BEST | {"options": {"num_tasks": 10**9}}], "stage 'best': `--first-task` .* must be <= env.num_train_tasks"),
        ([BEST | {"set": {"env": {"name": "nowhere"}}}], "stage 'best': `env.name` must be one of"),
        ([EXPLORE], "stage 'explore': .*judge"),
        (
            [EXPERT, IMITATE, {"name": "explore", "kind": "rl", "set": {"objective": {"advantage": "best"}}}],
            "stage 'explore': `objective.advantage` must be group_standardised",
        ),
    ],
)
def test_what_is_wrong_with_any_stage_is_found_before_the_first_one_starts(
    stages: list[object], complaint: str, tmp_path: Path
) -> None:
    path = written(tmp_path, *stages)
    with pytest.raises(ConfigError, match=complaint):
        check_road(read_road(path, []), first=0)
    assert [each.name for each in tmp_path.iterdir()] == ["road.yaml"]


def test_what_is_wrong_with_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, complaint in (
        ("[1]", "must be a mapping with config, set, stages, got [1]"),
        ("a: [", "cannot be read"),
        ("config: nowhere.yaml\nstages: [{name: a, kind: rl}]", "no config file at nowhere.yaml"),
        ("config: 5", "`config` must name a YAML file or several, got 5"),
        ("stage: []", "unknown key `stage`; a road has config, set, stages"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        assert main(["road", str(tmp_path / "bad.yaml")]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["road", str(tmp_path / "none.yaml")]) == 2
    assert "no config file at" in capsys.readouterr().err
    assert main(["road", written(tmp_path, BEST), "conf/quickstart.yaml"]) == 2
    assert "a road names its config files itself" in capsys.readouterr().err


def test_the_shipped_road_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["road", "conf/roads/shop.yaml", "--dry-run", "run.seed=3", "run.root=/nowhere"]) == 0
    said = capsys.readouterr().out
    assert "stage 5 of 5, refine (rl)" in said
    assert "model.path: '' -> '/nowhere/shop-road-best/trained_model'" in said


def test_a_gain_has_the_interval_of_newcombe() -> None:
    difference, low, high = gain(Success(solved=56, num_tasks=70), Success(solved=48, num_tasks=80))
    assert (difference, low, high) == pytest.approx((-0.2, -0.3339, -0.0524), abs=1e-4)
    assert gain(Success(solved=0, num_tasks=10), Success(solved=10, num_tasks=10))[2] == 1
