"""Stands in for the verbs of a road: `python -m tests.tools.road.road_verbs VERB ...` writes what the real verb would.

The model of a stage is a folder with one file, which names the stages that have trained it. Each call is a line in
`calls.txt` beside the runs. A file `fail-RUN` there, with an exit code in it, ends the verb of that run with this code
before it trains; a file `hang-RUN` holds it until the file is removed. It imports little, so that it starts at once.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HANGS_S = 120.0


def main(verb: str, *arguments: str) -> int:
    if verb == "fit":
        verb, arguments = f"fit {arguments[0]}", arguments[1:]
    if resumes := arguments[0] == "--resume":
        path = Path(given(arguments, "run.root")) / arguments[1] / "config.yaml"
    else:
        path = Path(arguments[1] if verb == "collect" else arguments[0])
    if verb == "replay":
        run, root, model = (given(arguments, key) for key in ("run.name", "run.root", "model.path"))
        assert (Path(model) / "trained_by").exists(), "the tokens of a run are those of its model"
        Path(arguments[1]).write_text(json.dumps({"of": run}) + "\n")
        with (Path(root) / "calls.txt").open("a") as calls:
            calls.write(f"{run}: replay {' '.join([arguments[0], *arguments[5:]])}\n")
        return 0
    config = yaml.safe_load(path.read_text())
    run, root = config["run"]["name"], Path(config["run"]["root"])
    with (root / "calls.txt").open("a") as calls:
        calls.write(f"{run}: {verb}{' --resume' if resumes else ''}\n")
    if verb == "prepare":
        write_model(root / run / "model", "base")
        return 0
    trained_by = (Path(given(arguments, "model.path") or config["model"]["path"]) / "trained_by").read_text()
    if verb == "eval":
        for sampling, success in (("sampled", min(1.0, 0.2 * len(trained_by.split()))), ("greedy", 0.5)):
            print(json.dumps({"env": "guess", "sampling": sampling, "num_tasks": 100, "success": success}))
        return 0
    if verb == "collect":
        row = {"success": True, "num_tokens": 7, "by": trained_by.split()}
        Path(arguments[0]).write_text(json.dumps(row) + "\n")
        return 0
    return train(root / run, config, trained_by=trained_by)


def given(arguments: Sequence[str], key: str) -> str:
    """The value of a setting; empty without one."""
    return next((str(yaml.safe_load(text[len(key) + 1 :])) for text in arguments if text.startswith(f"{key}=")), "")


def train(folder: Path, config: dict[str, Any], *, trained_by: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    hang, fail = (folder.with_name(f"{what}-{folder.name}") for what in ("hang", "fail"))
    end = time.monotonic() + HANGS_S
    while hang.exists() and time.monotonic() < end:
        time.sleep(0.02)
    if fail.exists():
        print("the disk is full", file=sys.stderr)
        return int(fail.read_text())
    write_model(folder / "trained_model", f"{trained_by} {folder.name}")
    measured = ({"step": 0, "fit/held_out_loss": 2}, {"step": 1, "fit/tokens": 30, "fit/held_out_loss": 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measured))
    cost = {"tokens_trained": 50, "wasted_tokens": {"preempted": 5}}
    (folder / "summary.json").write_text(json.dumps({"cost": cost}))
    return 0


def write_model(folder: Path, trained_by: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trained_by").write_text(trained_by)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
