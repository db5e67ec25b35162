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
from slipstream.tools.lab.peers.bench import Cell, main, page_of
from slipstream.tools.lab.peers.episode import Episode
from slipstream.tools.lab.peers.meter import Meter, Reading
from slipstream.tools.lab.peers.results import TASK, Point, Result
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
        TASK, [f"warm_start.episodes={NUM_DEMONSTRATIONS}", "warm_start.noise=0.5", f"run.root={root}"]
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
@pytest.mark.parametrize("arm", ["by hand", "by hand dropping"])
def test_the_loop_by_hand_makes_its_steps_and_the_page_is_written(arm: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "peers.md").write_text(f"# Peers\n\n{BEGIN}Nothing.\n{END}")
    arguments = ["--arms", arm, "--seeds", "0", "--steps", "2"]
    main([*arguments, "--folder", str(tmp_path / "cells"), "--docs", str(docs), *SHORT])
    cell = msgspec.json.decode((tmp_path / "cells" / f"{arm.replace(' ', '_')}-seed0.json").read_bytes(), type=Cell)
    assert [point.step for point in cell.result.points] == [0, 1, 2]
    assert cell.result.points[-1].episodes >= 16
    assert 0 < cell.result.trained_tokens <= cell.result.points[-1].tokens
    assert (cell.result.trained_tokens == cell.result.points[-1].tokens) == (arm == "by hand")
    assert cell.cpu_seconds[0] == 0 < cell.cpu_seconds[-1]
    assert cell.peak_memory_bytes > 100e6
    assert f"| {arm} |" in (docs / "peers.md").read_text()
    assert (docs / "peers.json").exists()


def test_the_page_names_tokens_cpu_and_memory_to_each_goal() -> None:
    points = [
        Point(step=20 * index, success=success, seconds=100.0 * index, episodes=1000 * index, tokens=10_000 * index)
        for index, success in enumerate((0.4, 0.7, 0.9))
    ]
    result = Result(arm="trl", seed=0, points=points, trained_tokens=20_000, cpu_seconds=390.0)
    cell = Cell(
        result=result, greedy=0.785, cpu_seconds=[0.0, 190.0, 390.0], peak_memory_bytes=800_000_000, load_before=0.1
    )
    page = page_of(f"# Peers\n{BEGIN}Nothing.\n{END}", [cell], ["default", "trl"], command="bench")
    row = next(line for line in page.splitlines() if "78.5%" in line)
    assert "**15,000** (15,000)" in row and "**290 s** (290 s)" in row and "**0.8 GB** (0.8 GB)" in row
    assert "default" not in page and "Nothing" not in page


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
