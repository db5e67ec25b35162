"""`slipstream up` with a file of stages: each begins with the model of the one before.

Stand-ins take the place of the verbs: `make road` walks a real road.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.common.config.config import Config, load_config
from slipstream.tools.cli.cli import main
from slipstream.tools.road.road_file import Stage
from slipstream.tools.road.road_table import Done, Success, add_outcome, gain
from tests.tools.cli.verbs import Output
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 120.0
WALK = (sys.executable, "-m", "tests.tools.road.stand_in_road")
EXPERT = {"expert": "collect --num-tasks=5 --expert"}
IMITATE = {"imitate": "fit sft --data=@expert optim.lr=0.25"}
PREFER = {"prefer": "fit dpo --data @expert --beta=1"}
PLAY = {"play": "collect --num-tasks 4"}
BEST = {"best": "fit sft --data=@play --best-of-group=2 --min-return=1"}
JUDGE = {"judge": "fit reward --data=@play"}
EXPLORE = {"explore": "up objective.reward_model=@judge learner.steps=3"}
LABEL = {"label": "collect --num-tasks=2 --completions=3"}
PROCESS = {"process": "fit prm --data=@label --epochs=2"}
GUIDED = {"guided": "collect --num-tasks=4 --search=tree_of_thoughts --reward-model=@process"}
Refusal = Callable[..., str]
BY_TURN = {"by-turn": "up objective.reward_model=@process objective.allocation=per_turn learner.steps=3"}


def written(folder: Path, *stages: object, **more: object) -> str:
    settings = ["run.name=r", f'run.root="{folder}"', "env.name=shop", "eval.num_tasks=100"]
    path = folder / "road.yaml"
    path.write_text(yaml.safe_dump({"settings": settings, "stages": list(stages), **more}))
    return str(path)


def walked(folder: Path, *stages: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*WALK, written(folder, *stages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=REPOSITORY)
    assert done.returncode == code, done.stderr
    return done


def test_a_held_out_loss_that_was_not_finite_ends_no_road(tmp_path: Path) -> None:
    config, command = load_config(None, ["run.name=r-imitate", f"run.root={tmp_path}"]), ["fit sft"]
    stage = Stage(name="imitate", config=config, command=command, options=None, made=tmp_path)
    stage.run_dir.create()
    records = [{"step": 0, "fit/held_out_loss": 1.5}, {"step": 9, "fit/tokens": 40, "fit/held_out_loss": None}]
    stage.run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = Done(command=command)
    add_outcome(done, stage)
    assert (done.tokens_trained, done.note) == (40, "held-out loss 1.50 to nan")


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Checks a road of such stages without running it; returns why it is refused, empty if it is not."""

    def check(*stages: object) -> str:
        capsys.readouterr()
        code, said = main(["up", written(tmp_path, *stages), "--dry-run"]), capsys.readouterr().err
        assert (code == 0) is (said == "")
        return said

    return check


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.removeprefix("r-") for line in lines]


def recorded(folder: Path) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((folder / "r" / "road.json").read_text())
    return stages


def config_of(folder: Path, name: str) -> Config:
    return load_config(str(folder / "r" / f"{name}.yaml"), [])


def test_each_stage_begins_with_the_model_of_the_one_before(tmp_path: Path) -> None:
    stages = (EXPERT, IMITATE, PREFER, PLAY, BEST, JUDGE, EXPLORE)
    done = walked(tmp_path, *stages)
    first = ["base: prepare", "r: eval", "expert: collect", "imitate: fit sft", "r: eval", "prefer: fit dpo", "r: eval"]
    then = ["play: collect", "best: fit sft", "r: eval", "judge: fit reward", "explore: up", "r: eval"]
    assert calls(tmp_path) == first + then
    trained_by = {name: (tmp_path / f"r-{name}" / "trained_model" / "trained_by") for name in ("explore", "judge")}
    assert trained_by["explore"].read_text() == "base r-imitate r-prefer r-best r-explore"
    assert trained_by["judge"].read_text() == "base r-imitate r-prefer r-best r-judge"
    assert json.loads((tmp_path / "r" / "play.jsonl").read_text())["by"] == ["base", "r-imitate", "r-prefer"]
    explore = config_of(tmp_path, "explore")
    assert explore.objective.reward_model == str(tmp_path / "r-judge" / "trained_model")
    assert (explore.learner.steps, explore.eval.num_tasks) == (3, 0)

    table = (tmp_path / "r" / "road.md").read_text().splitlines()
    assert table[4].startswith("| stage | verb | held-out success | gain |")
    assert table[6].startswith("| base | base | 20.0% (13% to 29%) |  | 50.0% (40% to 60%) |")
    assert table[8].startswith("| imitate | fit sft | 40.0% (31% to 50%) | +20.0 points (+7 to +32) |")
    assert table[8].endswith("|  | 30 | held-out loss 2.00 to 1.00 |")
    assert table[10].startswith("| play | collect |  |  |  |")
    assert table[10].endswith("| 7 |  | 1 successes in 1 episodes |")
    assert table[11].startswith("| best | fit sft | 80.0% (71% to 87%) | +20.0 points (+7 to +32) |")
    assert table[12].startswith("| judge | fit reward |  |  |  |")
    assert table[13].endswith("| 55 | 50 |  |")
    assert "imitate" in done.stdout and "+20.0 points" in done.stdout

    again = walked(tmp_path, *stages)
    assert calls(tmp_path) == []
    assert "best" in again.stdout


def test_rounds_end_when_one_gains_nothing_and_keep_the_last_good_model(tmp_path: Path, refusal: Refusal) -> None:
    """Each training raises success by a fifth, from a fifth: the fifth round cannot."""
    again = {"rounds": 7, "stages": [{"play": "collect --num-tasks=4"}, {"best": "fit sft --data=@play"}]}
    stages = ({"again": again}, {"prefer": "fit dpo --data=@again-1-play"})
    done = walked(tmp_path, *stages)
    round_of = lambda n: [f"again-{n}-play: collect", f"again-{n}-best: fit sft", "r: eval"]  # noqa: E731
    played = [call for number in range(1, 6) for call in round_of(number)]
    assert calls(tmp_path) == ["base: prepare", "r: eval", *played, "prefer: fit dpo", "r: eval"]
    assert "again: 4 of at most 7 rounds gained; the model of again-4-best" in done.stdout
    trained_by = (tmp_path / "r-prefer" / "trained_model" / "trained_by").read_text()
    assert trained_by == f"base {' '.join(f'r-again-{number}-best' for number in range(1, 5))} r-prefer"
    first_tasks = [recorded(tmp_path)[f"again-{number}-play"]["command"] for number in (1, 2, 3)]
    assert first_tasks == [["collect", "--num-tasks=4", *more] for more in ([], ["--first-task=4"], ["--first-task=8"])]
    assert recorded(tmp_path)["again"]["evaluation"]["sampled"] == {"solved": 100, "num_tasks": 100}
    walked(tmp_path, *stages)
    assert calls(tmp_path) == []
    more = refusal({"again": again | {"rounds": 8}}, stages[1])
    assert "stage 'again' has begun with other settings: rounds 7 -> rounds 8" in more


def test_rounds_of_which_none_gains_leave_the_model_as_it_was(tmp_path: Path) -> None:
    stages = [{f"best{number}": "up learner.steps=3"} for number in range(4)]
    done = walked(tmp_path, *stages, {"again": {"rounds": 3, "stages": [{"more": "up learner.steps=3"}]}}, {"on": "up"})
    assert "again: 0 of at most 3 rounds gained; the model of best3" in done.stdout
    trained_by = (tmp_path / "r-on" / "trained_model" / "trained_by").read_text()
    assert trained_by == "base r-best0 r-best1 r-best2 r-best3 r-on"


def test_the_episodes_of_a_run_are_the_data_of_a_stage(tmp_path: Path) -> None:
    """Also in a folder whose name YAML would read as something else."""
    folder = tmp_path / "it's #1: ü"
    folder.mkdir()
    stages = [{"explore": "up learner.steps=3"}, {"best": "fit sft --data=@explore --best-of-group=1"}]
    walked(folder, *stages, {"prefer": "fit dpo --data @explore"})
    trained = ["best: fit sft", "r: eval", "prefer: fit dpo", "r: eval"]
    explored = ["base: prepare", "r: eval", "explore: up", "r: eval", "explore: replay export --steps 1:3"]
    assert calls(folder) == [*explored, *trained]
    assert f"--data={folder / 'r' / 'explore.jsonl'}" in recorded(folder)["best"]["command"]


def test_the_teacher_of_a_stage_is_a_folder_or_an_earlier_stage_that_trains(refusal: Refusal) -> None:
    def distil(teacher: str) -> dict[str, str]:
        objective = f"objective.advantage=distillation objective.reference_model={teacher} objective.kl_place=reward"
        return {"distil": f"up {objective} objective.kl_coefficient=1"}

    assert refusal(EXPERT, IMITATE, distil("@imitate")) == ""
    no_folder, no_stage = refusal(EXPERT, IMITATE, distil("models/none")), refusal(EXPERT, distil("@none"))
    assert "stage 'distil': `objective.reference_model` models/none is not a Hugging Face" in no_folder
    assert "`objective.reference_model=@none` must name an earlier stage: base, expert" in no_stage


def test_a_process_reward_model_is_trained_on_labels_and_guides_later_stages(tmp_path: Path, refusal: Refusal) -> None:
    stages = (LABEL, PROCESS, GUIDED, BY_TURN)
    walked(tmp_path, *stages)
    made = ["label: collect", "process: fit prm", "guided: collect", "by-turn: up", "r: eval"]
    assert calls(tmp_path) == ["base: prepare", "r: eval", *made]
    model = str(tmp_path / "r-process" / "trained_model")
    assert f"--reward-model={model}" in recorded(tmp_path)["guided"]["command"]
    assert config_of(tmp_path, "by-turn").objective.reward_model == model
    unnamed = {"other": GUIDED["guided"].replace("@", "")}
    assert "`--reward-model` must be a folder, or the URL of a server, got 'process'" in refusal(*stages, unnamed)
    assert refusal(*stages, {"other": GUIDED["guided"].replace("@process", "http://127.0.0.1:7366")}) == ""


def test_a_stage_that_fails_is_named_and_only_what_is_missing_runs_again(tmp_path: Path) -> None:
    (tmp_path / "fail-r-best").write_text("1")
    failed = walked(tmp_path, PLAY, BEST, code=1)
    assert "slipstream up: stage 'best' ended with code 1" in failed.stderr and "the disk is full" in failed.stderr
    assert "best did not finish; the same command continues it" in failed.stderr
    assert calls(tmp_path) == ["base: prepare", "r: eval", "play: collect", "best: fit sft"]
    (tmp_path / "fail-r-best").unlink()
    walked(tmp_path, PLAY, BEST)
    assert calls(tmp_path) == ["best: fit sft", "r: eval"]


@pytest.mark.parametrize(
    ("number", "stages", "first", "then"),
    [
        (signal.SIGKILL, [{"go": "up"}], ["go: up"], ["go: up --resume"]),
        (signal.SIGTERM, [EXPERT, {"go": IMITATE["imitate"]}], ["expert: collect", "go: fit sft"], ["go: fit sft"]),
    ],
)
def test_a_road_that_was_stopped_continues_the_run_of_its_stage(
    number: signal.Signals, stages: list[object], first: list[str], then: list[str], tmp_path: Path
) -> None:
    hang = tmp_path / "hang-r-go"
    hang.touch()
    process = subprocess.Popen([*WALK, written(tmp_path, *stages)], cwd=REPOSITORY)
    wait_until(lambda: (tmp_path / "r-go" / "config.yaml").exists(), "the stage begins")
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    assert calls(tmp_path) == ["base: prepare", "r: eval", *first]
    hang.unlink()
    walked(tmp_path, *stages)
    assert calls(tmp_path) == [*then, "r: eval"]
    assert recorded(tmp_path)["go"]["finished"] and recorded(tmp_path)["go"]["seconds"] > 0


def test_a_stage_that_has_begun_keeps_its_settings_and_later_ones_may_change(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "fail-r-prefer").write_text("2")
    walked(tmp_path, EXPERT, IMITATE, PREFER, code=2)
    calls(tmp_path)
    hotter = {"imitate": "fit sft --data=@expert optim.lr=0.5"}
    for stages, change in (
        ([EXPERT, hotter, PREFER], "stage 'imitate' has begun with other settings: optim.lr: 0.25 -> 0.5"),
        ([EXPERT, IMITATE, {"prefer": "fit dpo --data=@expert"}], "has begun with other settings: fit dpo --data="),
        ([EXPERT, PREFER], "stage 'prefer' has begun with other settings: model.path: "),
    ):
        said = refusal(*stages)
        assert change in said and "; choose another `run.name`, or undo the change" in said
    (tmp_path / "fail-r-prefer").unlink()
    walked(tmp_path, EXPERT, IMITATE, PREFER, PLAY, BEST)
    assert calls(tmp_path) == ["prefer: fit dpo", "r: eval", "play: collect", "best: fit sft", "r: eval"]


def test_a_run_of_that_name_which_is_not_the_roads_is_left_alone(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "r-best").mkdir()
    (tmp_path / "r-best" / "config.yaml").write_text("run: {name: r-best}\n")
    assert f"stage 'best': {tmp_path}/r-best exists and does not belong to this road" in refusal(PLAY, BEST)


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ([], "Expected `array` of length >= 1 - at `$.stages`; a road has lists of `settings`, and of `stages` as"),
        ([5], "Expected `object`, got `int` - at `$.stages[0]`"),
        ([PLAY | BEST], "Expected `object` of length <= 1 - at `$.stages[0]`"),
        ([{"a": {"rounds": 0, "stages": [PLAY]}}], "Expected `int` >= 1 - at `$.stages[0][...].rounds`"),
        ([{"a": {"rounds": 2, "stages": [PLAY]}}], "stage 'a': no stage of its rounds trains the model; add `fit sft`"),
        ([{"a": {"rounds": 2, "stages": [BEST]}}], "stage 'a': `--data=@play` must name an earlier stage: base"),
        ([EXPERT, {"expert": "fit sft"}], "stage 'expert': the name is taken, as base, expert are"),
        ([{"a b": "up"}], "Expected `str` matching regex '^[a-z0-9][a-z0-9_-]*$' - at `key` in `$.stages[0]`"),
        ([{"best": "ppo"}], "must begin with one of collect, fit sft, fit dpo, fit reward, fit prm, up, got 'ppo'"),
        ([{"best": ""}], "stage 'best': the command must begin with one of"),
        ([{"best": "up 'x"}], "stage 'best': No closing quotation"),
        ([{"best": "fit sft --min-retrun=1"}], "error: no option --min-retrun=1; did you mean `--min-return`?"),
        ([{"best": "fit sft --epochs=x"}], "stage 'best': slipstream fit sft: error: argument --epochs: invalid int"),
        ([{"best": "fit sft --epochs=0"}], "stage 'best': `--epochs` must be >= 1, got 0"),
        ([IMITATE], "stage 'imitate': `--data=@expert` must name an earlier stage: base"),
        ([IMITATE, EXPERT], "stage 'imitate': `--data=@expert` must name an earlier stage: base"),
        ([{"best": "fit sft --data=expert"}], "`--data` must be a file, or an earlier stage as @NAME, got 'expert'"),
        ([{"best": "up optim.lrr=1"}], "stage 'best': unknown config key `optim.lrr`; did you mean"),
        ([{"best": "up model.path=x"}], "stage 'best': `model.path=x` cannot be of a stage"),
        ([{"best": "up --resume x"}], "stage 'best': `--resume` cannot be of a stage"),
        ([{"best": f"collect --num-tasks={10**9}"}], "stage 'best': `--first-task` + `--num-tasks` must be <= env"),
        ([{"best": "collect env.name=nowhere"}], "stage 'best': `env.name` must be one of"),
        ([{"explore": "up objective.reward_model=judge"}], "stage 'explore': `objective.reward_model` judge is not"),
        ([EXPERT, IMITATE, {"explore": "up objective.advantage=best"}], "`objective.advantage` must be group_stand"),
    ],
)
def test_what_is_wrong_with_any_stage_is_found_before_the_first_one_starts(
    stages: list[object], complaint: str, tmp_path: Path, refusal: Refusal
) -> None:
    assert complaint in refusal(*stages)
    assert [each.name for each in tmp_path.iterdir()] == ["road.yaml"]


def test_what_is_wrong_with_the_file_is_named(tmp_path: Path, refused: Output) -> None:
    for text, complaint in (
        ("[stages:, 1]", "cannot read"),
        ("a: [", "cannot read"),
        ("stages: [", "cannot read"),
        ("settings: [nowhere.yaml]\nstages: [{a: up}]", "no config file at nowhere.yaml"),
        ("settings: 5\nstages: [{a: up}]", "Expected `array`, got `int` - at `$.settings`"),
        ("stages: [{a: up}]\nsetting: []", "Object contains unknown field `setting`"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        assert complaint in refused("up", str(tmp_path / "bad.yaml"))
    assert "no config file at" in refused("up", str(tmp_path / "none.yaml"))
    assert "road.yaml with --resume or --replay-archive" in refused("up", written(tmp_path, PLAY), "--resume", "r")


def test_settings_are_of_all_stages_unless_one_has_its_own(tmp_path: Path, printed: Output) -> None:
    said = printed("up", written(tmp_path, EXPERT, IMITATE), "optim.lr=0.5", "run.seed=3", "--dry-run")
    assert "optim.lr: 0.5 -> 0.25" in said and "run.seed" not in said
    assert "lr: 0.5" in printed("up", str(tmp_path / "road.yaml"), "optim.lr=0.5", "--print-config")


def test_the_shipped_road_is_right(printed: Output) -> None:
    said = printed("up", "conf/roads/shop.yaml", "--dry-run", "run.seed=3", "run.root=/nowhere")
    assert "refine: up\n" in said
    assert "model.path: '' -> '/nowhere/shop-road-best/trained_model'" in said


def test_a_gain_has_the_interval_of_newcombe() -> None:
    difference, low, high = gain(Success(solved=56, num_tasks=70), Success(solved=48, num_tasks=80))
    assert (difference, low, high) == pytest.approx((-0.2, -0.3339, -0.0524), abs=1e-4)
    assert gain(Success(solved=0, num_tasks=10), Success(solved=10, num_tasks=10))[2] == 1
