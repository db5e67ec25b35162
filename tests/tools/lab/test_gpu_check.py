"""`make gpu-check` in its reduced form, how it treats items that fail, and the numbers that it takes from elsewhere.

The item `loop`, a whole run, is left out here for time: `test_loop` and `test_up` run more than it does.
"""

import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.config.config import dump_config
from slipstream.learner.model import attention
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.lab.gpu_check import kernels, small, steps
from slipstream.tools.lab.gpu_check.__main__ import ITEMS, main, run_item
from slipstream.tools.lab.gpu_check.findings import Findings, Result, read_rows
from slipstream.tools.lab.gpu_check.shape import PLANNED, QWEN, config_of
from slipstream.tools.plan.measured_step import MeasuredStep
from tests.tools.plan.test_fake_gpu import run_steps

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 250.0
HERE = [name for name in ITEMS if name != "loop"]


def test_every_item_passes_in_the_reduced_form(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream.tools.lab.gpu_check",
            "--device",
            "cpu",
            "--out",
            str(tmp_path),
            "--only",
            *HERE,
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + (tmp_path / "gpu_check.md").read_text()
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(item["name"], item["state"]) for item in report["items"]] == [(name, "passed") for name in HERE]
    page = (tmp_path / "gpu_check.md").read_text()
    assert "the reduced form, on a CPU" in page and "every tensor moves" in page


ITEM = "from slipstream.tools.lab.gpu_check.findings import Findings\ndef check(findings, device):\n    "
FAILING: dict[str, tuple[str, str, str]] = {  # body, state, and what the reason says
    "crashes": ("findings.require('first', True); import os; os.abort()", "failed", "exit code -6"),
    "raises": ("raise ValueError('of this')", "failed", "ValueError: of this"),
    "hangs": ("findings.require('first', True); import time; time.sleep(600)", "failed", "not finished within 8 s"),
    "lacks": ("import no_such_package.part", "not run", "package no_such_package is not installed"),
    "lost": ("import slipstream.none_such", "failed", "No module named 'slipstream.none_such'"),
    "exceeds": ("findings.at_most('the width', 2.0, 1.0)", "failed", "out of bounds: the width"),
    "unknown": ("findings.at_most('the width', float('nan'), 1.0)", "failed", "out of bounds: the width"),
    "empty": ("findings.note('the width', 1.0)", "failed", "it checked nothing"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_item_leaves_its_rows_and_a_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, state, reason = FAILING[name]
    (tmp_path / f"{name}.py").write_text(ITEM + body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_item(name, device="cpu", limit_s=8 if name == "hangs" else 60)
    assert (found.name, found.state) == (name, state)
    assert reason in found.reason and "\n" not in found.reason
    if "first" in body:
        assert [row.name for row in found.rows] == ["first"]


def test_what_a_hanging_item_started_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    (tmp_path / "starts.py").write_text(ITEM + body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_item("starts", device="cpu", limit_s=8)
    left, deadline = int(found.log), time.monotonic() + LIMIT_S
    while _runs(left):
        assert time.monotonic() < deadline, "what the item started still runs"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_exit_code_is_1_if_an_item_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = Result(name="head", state="not run", reason="the Python package torch is not installed")
    monkeypatch.setattr("slipstream.tools.lab.gpu_check.__main__.run_item", lambda *_, **__: lacks)
    assert main(["--device", "cpu", "--out", str(tmp_path), "--only", "head"]) == 1
    assert "package torch is not installed" in (tmp_path / "gpu_check.md").read_text()


def test_a_row_that_a_kill_cut_short_is_left_out() -> None:
    file = io.StringIO()
    Findings(file=file).at_most("the width", math.inf, 1.0)
    (row,) = read_rows(file.getvalue() + '{"name": "the hei')
    assert (row.value, row.bound, row.holds) == ("inf", "<= 1", False)


def test_the_peak_that_a_gpu_is_compared_with_is_that_of_the_plan(tmp_path: Path) -> None:
    """Each decoder layer adds as many bytes: two and three layers give the peak of all, in a fraction of the time."""
    arguments = []
    for num_layers in (2, 3):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(QWEN | {"num_hidden_layers": num_layers}))
        for num_tokens in PLANNED:
            path = folder / f"{num_tokens}.yaml"
            path.write_text(dump_config(config_of(folder, num_tokens=num_tokens)))
            arguments += [str(path), "1"]
    done = run_steps(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    peaks = [msgspec.json.decode(line, type=MeasuredStep).step_peak_bytes for line in done.stdout.splitlines()]
    more = int(QWEN["num_hidden_layers"]) - 2
    planned = [two + more * (three - two) for two, three in zip(peaks[:2], peaks[2:], strict=True)]
    assert planned == pytest.approx(list(PLANNED.values()), rel=0.005), "write these numbers into PLANNED"


def broken(check: Callable[[Findings], None]) -> list[str]:
    file = io.StringIO()
    check(Findings(file=file))
    return [row.name for row in read_rows(file.getvalue()) if row.holds is False]


def test_steps_with_another_learning_rate_or_a_frozen_tensor_are_noticed(tmp_path: Path, ranks: Ranks) -> None:
    folder = small.save("qwen3", tmp_path)
    mine, theirs = (small.load(folder, ranks=ranks, dtype="float32") for _ in range(2))
    mine.optimizer.param_groups[0]["params"].pop()
    for group in mine.optimizer.param_groups:
        group["initial_lr"] *= 1.1
    mine.schedule.base_lrs = [1.1 * lr for lr in mine.schedule.base_lrs]
    found = broken(
        partial(steps._compare, what="dense", mine=mine, theirs=theirs, limits=steps.LIMITS["dense", "float32"])
    )
    assert any("every tensor moves" in name for name in found)
    assert any("error of a tensor's change" in name for name in found)


def test_a_kernel_that_ignores_the_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "packed_attention", partial(_without_window, attention.packed_attention))
    found = broken(partial(kernels.check, device="cpu"))
    assert len(found) == 4 and all("window 17" in name for name in found)


def _without_window(attend: Callable[..., object], *args: object, sliding_window: object, **others: object) -> object:
    return attend(*args, sliding_window=None, **others)


def test_flash_attention_without_grouped_queries_gets_as_many_keys_as_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11's function has no `enable_gqa`; this one stands in for it on a CPU, with its signature."""

    def varlen(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        assert query.shape[1] == key.shape[1] == value.shape[1]
        parts = [
            F.scaled_dot_product_attention(
                *(each[start:stop].transpose(0, 1) for each in (query, key, value)), is_causal=True
            )
            for start, stop in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False)
        ]
        return torch.cat(parts, dim=1).transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "FLASH_TAKES_GROUPS", False)
    monkeypatch.setattr(attention, "flash_runs", lambda query, value: True)
    lengths = [9, 5, 2]
    tensors = kernels._tensors(12, 2, 64, lengths, torch.device("cpu"))
    assert kernels._error(tensors, lengths, dtype=torch.float32, window=None) < 1e-6
