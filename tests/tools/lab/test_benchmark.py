"""A benchmark's rows say what was measured, and the tables in docs are those of the recorded runs."""

from pathlib import Path

import msgspec
import pytest

from slipstream.common.config.config import load_config
from slipstream.common.records.trajectory import Trajectory
from slipstream.tools.lab.bench import benchmark
from slipstream.tools.lab.bench.actors import CONFIG, turns_in_order
from slipstream.tools.lab.bench.benchmark import Benchmark, Machine, Row
from slipstream.tools.lab.bench.load import episode_loop as bench_episode_loop
from slipstream.tools.lab.bench.load.episode_loop import episode_loop
from slipstream.tools.run.prepare import load_tokenizer, model_folder, prepare
from tests.learner.even_game import recorded
from tests.replay.records.attempts import turn

ROWS = [
    Row.of("loop", [2.0, 9.0, 3.0], unit="s", against=[1.0, 3.0, 2.0], goal="ratio <= 2"),
    Row.of("pause", [5.0], unit="ms", against=[2.0]),
]
MACHINE = Machine(
    cpu="a CPU", num_cores=2, memory_gib=23.5, gpu="", versions={"python": "3.11"}, load_before=0.5, load_after=1.5
)
BENCHMARK = Benchmark(
    name="actors", date="2026-01-01", command="make bench-actors", machine=MACHINE, wall_s=3.0, rows=ROWS
)


def test_a_row_holds_the_medians_of_its_pairs_and_the_range_of_their_ratio() -> None:
    row = ROWS[0]
    assert (row.value, row.against, row.ratio, row.ratio_range) == (3.0, 2.0, 2.0, (1.5, 3.0))
    assert row.num_repeats == 3


def test_a_goal_is_of_the_ratio_or_of_the_value() -> None:
    def holds(goal: str) -> bool | None:
        return Row.of("a", [6.0], unit="ms", against=[2.0], goal=goal).holds

    assert holds("ratio <= 3") and not holds("ratio >= 3.5")
    assert holds("value <= 6") and not holds("value >= 6.1")
    assert holds("") is None
    with pytest.raises(ValueError, match="a goal must look like"):
        holds("ratio < 3")


def test_a_run_is_written_as_json_and_into_its_place_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- actors -->\nyesterday's\n<!-- end of actors -->\nafter\n")
    benchmark.write(BENCHMARK, tmp_path)
    assert benchmark.read("actors", tmp_path) == BENCHMARK
    text = page.read_text()
    assert text.startswith("before\n<!-- actors -->\n| what |") and text.endswith("<!-- end of actors -->\nafter\n")
    assert "| loop | 2 (1.5-3) | <= 2 |\n" in text
    assert "| pause |" not in text and "[All rows](benchmarks/actors.json)" in text
    assert "yesterday" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="<!-- actors -->"):
        benchmark.write(BENCHMARK, tmp_path)


def test_a_goal_that_does_not_hold_is_called_missed() -> None:
    missed = Row.of("loop", [3.0], unit="s", against=[1.0], goal="ratio <= 2")
    page = benchmark.markdown(msgspec.structs.replace(BENCHMARK, rows=[missed]))
    assert "| loop | 3 | <= 2, **missed** |\n" in page


def test_a_benchmark_without_goals_has_no_table_on_the_page() -> None:
    rows = [Row.of("one: pause", [5.0], unit="ms", against=[2.0])]
    page = benchmark.markdown(msgspec.structs.replace(BENCHMARK, rows=rows))
    assert "|" not in page and "[All rows](benchmarks/actors.json)" in page


@pytest.mark.parametrize("name", [file.stem for file in sorted((benchmark.DOCS / "benchmarks").glob("*.json"))])
def test_the_table_in_docs_is_that_of_the_recorded_run(name: str) -> None:
    page = (benchmark.DOCS / "benchmarks.md").read_text()
    assert benchmark.with_table(page, benchmark.read(name)) == page


def test_the_episode_loop_plays_the_script_word_for_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so itself where it does not; here with few lanes and no time to wait."""
    monkeypatch.setattr(bench_episode_loop, "NUM_LANES", 4)
    monkeypatch.setattr(bench_episode_loop, "REPEATS", 2)
    monkeypatch.setattr(bench_episode_loop, "SCHEDULE", bench_episode_loop.Schedule(prefill_s=0.0, token_time_s=0.001))
    overrides = [f"run.root={tmp_path}", "warm_start.episodes=0", "replay.group_size=2"]
    config = load_config(str(CONFIG), overrides)
    wall, cpu, busy_cpu = episode_loop(config, load_tokenizer(model_folder(config, prepare(config)), config.model))
    assert wall.value > 0 and wall.num_repeats == 2
    assert 0 < cpu.value < 100 and 0 < busy_cpu.value < 100


def test_offline_turns_have_the_prompt_of_their_branch_and_come_in_the_order_of_asking() -> None:
    first = played(started_at_s=10.0, generate_s=5.0)
    second = played(started_at_s=11.0, generate_s=1.0)
    turns = turns_in_order([first, second], temperature=0.7)
    assert [(turn.asked_at_s, turn.prompt, turn.num_tokens) for turn in turns] == [
        (10.0, [0, 1], 2),
        (11.0, [0, 1], 2),
        (12.5, [5, 6], 1),
        (15.5, [5, 6], 1),
    ]
    assert {turn.temperature for turn in turns} == {0.7}


def played(*, started_at_s: float, generate_s: float) -> Trajectory:
    """Two turns, the second in a branch of its own; the environment took half a second for each."""
    turns = [
        msgspec.structs.replace(turn(start, stop), generate_s=generate_s, env_s=0.5) for start, stop in ((2, 4), (7, 8))
    ]
    sampled = [False, False, True, True, False, False, False, True]
    trajectory = recorded(range(8), [0.0] * 8, sampled, turns=turns, branch_starts=[0, 5])
    return msgspec.structs.replace(trajectory, started_at_s=started_at_s)
