"""The learning curve of a run: its metrics in, a chart out."""

import re

from slipstream.tools.lab.study.curve import curve

BEFORE = {"sampled": 0.25, "greedy": 0.5, "num_tasks": 4}
AFTER = {"sampled": 1.0, "greedy": 1.0, "num_tasks": 4}


def test_a_bin_weighs_each_step_by_its_episodes() -> None:
    few = {"step": 1, "produced/success": 0.0, "produced/episodes": 10}
    many = {"step": 2, "produced/success": 1.0, "produced/episodes": 30}
    rest = [{"step": step, "produced/success": 1.0, "produced/episodes": 10} for step in range(3, 21)]
    text = curve([few, many, *rest], {"initial": BEFORE, "warm_start": BEFORE, "final": AFTER})
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)" r="3" fill="#1b6ca8"', text)]
    top, bottom = 30.0, 370.0
    assert heights == [bottom - 0.75 * (bottom - top), *[top] * 9]


def test_steps_without_episodes_leave_no_point() -> None:
    records = [
        {"step": 1, "eval/success_sampled": 0.2},
        {"step": 5, "produced/episodes": 0},
        {"step": 10, "produced/success": 0.5, "produced/episodes": 4},
    ]
    text = curve(records, {"initial": BEFORE, "final": AFTER})
    assert text.count('r="3" fill="#1b6ca8"') == 1
    assert text.count("<circle") == 1 + 2 + 2
