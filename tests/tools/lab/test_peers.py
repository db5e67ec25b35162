"""The bench of peers: its episodes are those of the actors, the loop by hand learns, and the page has its tables.

TRL needs an environment of its own, so only `make bench-peers` runs it.
"""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.lab.peers.bench import ARMS, BENCHES, SETS, Cell, main, plan_of, table
from slipstream.tools.lab.peers.episode import Episode
from slipstream.tools.lab.peers.meter import Meter, Reading
from slipstream.tools.lab.peers.results import Point, Result
from slipstream.tools.lab.study.page import BEGIN, END
from slipstream.tools.run.prepare import demonstrate, load_tokenizer, model_folder, prepare

ROOT = Path(__file__).parents[3]
NUM_DEMONSTRATIONS = 40
# Enough of a warm start for groups with unequal returns: the loop by hand replaces the others for ever.
SHORT = ["warm_start.episodes=400", "replay.groups_per_step=2", "eval.num_tasks=4", "eval.every=1"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RunDir]:
    root = tmp_path_factory.mktemp("peers")
    config = load_config(
        "conf/quickstart.yaml",
        [f"warm_start.episodes={NUM_DEMONSTRATIONS}", "warm_start.noise=0.5", f"run.root={root}"],
    )
    return config, prepare(config)


def test_an_episode_has_the_tokens_and_the_rewards_of_the_actors(prepared: tuple[Config, RunDir]) -> None:
    config, run_dir = prepared
    tokenizer = load_tokenizer(model_folder(config, run_dir), config.model)
    for trajectory in demonstrate(config, tokenizer):
        episode = Episode(trajectory.task, config, tokenizer)
        for turn in trajectory.turns:
            assert not episode.done
            assert len(episode.tokens) == turn.start
            episode.answer([int(token) for token in trajectory.token_array()[turn.start : turn.stop]])
        assert episode.done
        assert episode.tokens == trajectory.token_array().tolist()
        assert episode.loss_mask == trajectory.loss_mask_array().tolist()
        assert episode.total_reward == pytest.approx(trajectory.total_reward)
        assert episode.success == trajectory.success


@pytest.mark.long
@pytest.mark.parametrize(("arm", "every"), [("by hand", 1), ("by hand dropping", 1), ("by hand", 0)])
def test_the_loop_by_hand_makes_its_steps_and_the_page_is_written(arm: str, every: int, tmp_path: Path) -> None:
    docs = tmp_path / "studies"
    docs.mkdir()
    (docs / "peers.md").write_text(f"# Peers\n\n{BEGIN}Nothing.\n{END}")
    arguments = ["--arms", f"{arm}@1e-4", "--seeds", "0", "--steps", "2", *SHORT, f"eval.every={every}"]
    main([*arguments, "--folder", str(tmp_path / "cells"), "--docs", str(tmp_path)])
    file = tmp_path / "cells" / "shop" / f"{arm.replace(' ', '_')}_at_1e-4-seed0.json"
    cell = msgspec.json.decode(file.read_bytes(), type=Cell)
    assert [point.step for point in cell.result.points] == ([0, 1, 2] if every else [1, 2])
    assert cell.result.points[-1].episodes >= 16
    assert 0 < cell.result.trained_tokens <= cell.result.points[-1].tokens
    assert (cell.result.trained_tokens == cell.result.points[-1].tokens) == (arm == "by hand")
    assert cell.cpu_seconds[0] <= cell.cpu_seconds[-1]
    assert cell.peak_memory_bytes > 100e6
    page = (docs / "peers.md").read_text()
    assert f"| {arm}@1e-4 |" in page and "Nothing" not in page
    assert (docs / "peers.json").exists()


@pytest.mark.parametrize("task", ["sums", "guess"])
def test_every_arm_of_the_real_benches_has_settings_that_a_run_accepts(task: str, tmp_path: Path) -> None:
    arms = {*SETS["equal"], *SETS["best"], *SETS["factors"]}
    assert {arm.partition("@")[0] for arm in arms} == set(ARMS)
    plans = [
        plan_of(arm, 1, bench=BENCHES[task], folder=tmp_path, steps=2, settings=[], trl_python="python")
        for arm in sorted(arms)
    ]
    assert len({plan.config.run.name for plan in plans}) == len(plans)
    assert {plan.config.optim.lr for plan in plans} == {3e-6, 1e-5, 3e-5}


def test_the_table_names_tokens_cpu_and_memory_to_each_goal_and_seeds_that_never_reach_it() -> None:
    def cell(seed: int, *successes: float) -> Cell:
        points = [
            Point(step=20 * index, success=success, seconds=100.0 * index, episodes=1000 * index, tokens=10_000 * index)
            for index, success in enumerate(successes)
        ]
        result = Result(arm="trl", seed=seed, points=points, trained_tokens=20_000, cpu_seconds=390.0)
        return Cell(
            result=result, greedy=0.785, cpu_seconds=[0.0, 190.0, 390.0], peak_memory_bytes=800_000_000, load_before=0.1
        )

    text = table([cell(0, 0.4, 0.7, 0.9), cell(1, 0.4, 0.5, 0.6)], ["default", "trl"], goals=(0.8,))
    row = next(line for line in text.splitlines() if "78.5%" in line)
    goal = "| **150 s** (150 s, never) | **30** (30, never) | **15,000** (15,000, never) | **290 s** (290 s, never) |"
    assert goal in row
    assert "**75%** (90%, 60%)" in row and "**0.8 GB** (0.8 GB, 0.8 GB)" in row
    assert "default" not in text


def test_cpu_time_between_two_moments_is_interpolated() -> None:
    readings = [Reading(time=10.0 * index, cpu_seconds=15.0 * index, memory_bytes=index) for index in range(4)]
    meter = Meter(readings=readings)
    assert np.isclose(meter.cpu_between(5.0, 25.0), 30.0)
    assert meter.peak_memory_bytes == 3


# Imports `modules` where only `distributions`, and what they need, are installed.
IMPORTS = """
import importlib, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
distributions, modules = sys.argv[1].split(), sys.argv[2].split()
OURS = {"slipstream"}
def plain(name): return re.sub("[-_.]+", "-", name).lower()
allowed = set()
def allow(name):
    if plain(name) not in allowed:
        allowed.add(plain(name))
        try:
            for needed in requires(name) or ():
                if "extra ==" not in needed:
                    allow(re.match(r"[A-Za-z0-9_.-]+", needed)[0])
        except PackageNotFoundError:
            pass
for distribution in distributions: allow(distribution)
for top, found in packages_distributions().items():
    if not allowed & {plain(each) for each in found} and top not in OURS:
        sys.modules[top] = None  # cannot be imported, and is not found either
for module in modules: importlib.import_module(module)
"""


def test_the_environment_of_trl_has_all_that_our_side_of_it_imports() -> None:
    pins = (ROOT / "requirements" / "peers-trl.txt").read_text().splitlines()
    distributions = [pin.partition("==")[0] for pin in pins if "==" in pin] + ["torch"]
    program = (ROOT / "tools" / "lab" / "peers" / "trl_grpo.py").read_text()
    modules = re.findall(r"^from (slipstream\.\S+) import", program, re.MULTILINE)
    assert "slipstream.tools.lab.peers.episode" in modules
    command = [sys.executable, "-c", IMPORTS, " ".join(distributions), " ".join(modules)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    short = [sys.executable, "-c", IMPORTS, "torch transformers numpy", " ".join(modules)]
    assert "import of omegaconf halted" in subprocess.run(short, cwd=ROOT, capture_output=True, text=True).stderr
