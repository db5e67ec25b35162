"""`slipstream up` with a file of stages: from a base model to an agent, with an evaluation after each.

A stage is the process that a person would start by hand. What has finished is recorded in `road.json`, so the same
command continues a road that was stopped.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from slipstream.common.config.config import Config, differences, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import held, write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.tools.cli.cli import setting
from slipstream.tools.road.road_file import TRAINING, Stage, check_stages, read_stages
from slipstream.tools.road.road_table import (
    COLUMNS,
    Done,
    Records,
    add_outcome,
    evaluation_of,
    good_rounds,
    load_records,
    row_of,
    save_records,
)
from slipstream.tools.run.child import EXIT_BAD_INPUT, Child, kill_descendants, print_failure, verb_command
from slipstream.tools.terminal.table import print_rows

POLL_S = 0.2
CLI = verb_command()
PREPARE = [sys.executable, "-P", "-m", "slipstream.tools.run.prepare"]


def road(config: Config, *, path: str, settings: Sequence[str], dry_run: bool) -> int:
    """Run every stage that has not finished, and print the table; return the exit code. Raises ConfigError."""
    stages, run_dir = read_stages(path, settings, config), RunDir(config.run.root, config.run.name)
    records = load_records(run_dir.path)
    for stage in stages:
        _check_begun(stage, records, run_dir.path)
    finished = [name for name, done in records.items() if done.finished]
    check_stages(stages, finished=finished)
    if dry_run:
        for stage in stages:
            print(f"{stage.name}: {' '.join(stage.command)}")
            print("".join(f"  {change}\n" for change in differences(config, stage.config)), end="")
        return 0
    run_dir.create()
    shutdown = Shutdown(at_once=lambda: kill_descendants(psutil.Process()))
    with held(run_dir.path):
        write_whole(run_dir.path / "evaluation.yaml", dump_config(config))
        for stage in stages:
            title, number = stage.part
            if stage.name in finished or (number > 1 and len(good_rounds(title, stages, records)) < number - 1):
                continue
            if stage.command[0] == "rounds":
                _take(stage, stages, config, records, run_dir.path)
            elif code := _finish(stage, stages, config, records, run_dir, shutdown):
                return code
    print_rows(COLUMNS, [row_of(records, name) for name in records])
    print(f"the table and all numbers are in {run_dir.path}/road.md and road.json")
    return 0


def _check_begun(stage: Stage, records: Records, folder: Path) -> None:
    """Raise ConfigError if the stage has begun with other settings, or if its run is not of this road."""
    if (begun := records.get(stage.name)) is None:
        if stage.run_dir.config.exists():
            raise ConfigError(
                f"stage {stage.name!r}: {stage.run_dir.path} exists and does not belong to this road; choose another "
                "`run.name`, or remove it"
            )
        return
    changes = differences(load_config(str(folder / f"{stage.name}.yaml"), []), stage.config)
    if begun.command != stage.command:
        changes.append(f"{' '.join(begun.command)} -> {' '.join(stage.command)}")
    if changes:
        raise ConfigError(
            f"stage {stage.name!r} has begun with other settings: {'; '.join(changes)}; choose another `run.name`, or "
            "undo the change"
        )


def _take(stage: Stage, stages: Sequence[Stage], config: Config, records: Records, folder: Path) -> None:
    """Let the model of the last round that gained, or else the one before all rounds, be that of `stage`."""
    good, parts = good_rounds(stage.name, stages, records), [each for each in stages if each.part[0] == stage.name]
    before = [each.name for each in stages[: stages.index(parts[0])] if each.command[0] in TRAINING]
    taken = next(each for each in stages if each.name == (good or before)[-1])
    write_whole(folder / f"{stage.name}.yaml", dump_config(stage.config))
    stage.run_dir.path.mkdir(mode=0o700, exist_ok=True)
    stage.made.unlink(missing_ok=True)
    stage.made.symlink_to(os.path.relpath(taken.made.resolve(), stage.run_dir.path.resolve()))
    note = f"{len(good)} of at most {parts[-1].part[1]} rounds gained; the model of {taken.name}"
    evaluation = records[taken.name].evaluation
    records[stage.name] = Done(command=stage.command, finished=True, note=note, evaluation=evaluation)
    save_records(records, folder, config)
    print(f"{stage.name}: {note}", flush=True)


def _finish(
    stage: Stage, stages: Sequence[Stage], config: Config, records: Records, run_dir: RunDir, shutdown: Shutdown
) -> int:
    """Run a stage to its end, evaluate its model if it trained one, and record it; return the exit code."""
    folder, saved = run_dir.path, run_dir.path / f"{stage.name}.yaml"
    write_whole(saved, dump_config(stage.config))
    done = records.setdefault(stage.name, Done(command=stage.command))
    save_records(records, folder, config)
    print(f"{stage.name}: {' '.join(stage.command)}, {run_dir.log(stage.name)}", flush=True)
    for other in stages:
        is_missing = other.command[0] == "up" and stage.reads == str(other.rows) and not Path(stage.reads).exists()
        if is_missing and (code := _run(stage.name, _export(other), run_dir.log(stage.name), shutdown)):
            return code
    started = time.monotonic()
    code = _run(stage.name, _command(stage, str(saved)), run_dir.log(stage.name), shutdown)
    done.seconds += time.monotonic() - started
    save_records(records, folder, config)
    if not code and stage.command[0] in TRAINING:
        output = folder / f"{stage.name}-evaluation.jsonl"
        command = [*CLI, "eval", str(folder / "evaluation.yaml"), setting("model.path", stage.made)]
        if not (code := _run(stage.name, command, run_dir.log(stage.name), shutdown, output=output)):
            done.evaluation = evaluation_of(output)
    if code:
        return code
    add_outcome(done, stage)
    done.finished = True
    save_records(records, folder, config)
    cells = zip(COLUMNS[2:], row_of(records, stage.name)[2:], strict=True)
    print("  " + ", ".join(f"{column} {cell}" for column, cell in cells if cell), flush=True)
    return 0


def _command(stage: Stage, saved: str) -> list[str]:
    """The command of a stage, whose configuration is in the file `saved`; empty if the base model exists."""
    verb, *options = stage.command
    if verb == "base":
        return [] if stage.config.model.path else [*PREPARE, saved]
    if verb == "collect":
        return [*CLI, verb, str(stage.made), saved, "--force", *options]
    if verb == "up" and stage.run_dir.config.exists():
        return [*CLI, verb, "--resume", stage.config.run.name, setting("run.root", stage.config.run.root)]
    return [*CLI, *verb.split(), saved, *options]


def _export(stage: Stage) -> list[str]:
    """The command that writes the episodes on which the run of a stage was trained, in the tokens of its model."""
    run, steps = stage.config.run, f"1:{stage.config.learner.steps}"
    given = {"run.name": run.name, "run.root": run.root, "model.path": stage.config.model.path}
    return [*CLI, "replay", "export", str(stage.rows), *map(setting, given, given.values()), "--steps", steps]


def _run(name: str, command: list[str], log: Path, shutdown: Shutdown, *, output: Path | None = None) -> int:
    """Run one process to its end, or until a signal; return the exit code, and print why it failed."""
    if not command:
        return 0
    child = Child(f"stage {name!r}", command, log=log, environment={}, output=output)
    child.start()
    while child.exit_code is None and not shutdown.requested.wait(POLL_S):
        pass
    if shutdown.requested.is_set():
        print(f"stopping {child.name}; press Ctrl-C again to stop at once", flush=True)
        child.end(math.inf)
        return shutdown.exit_code
    if not child.exit_code:
        return 0
    print_failure("up", child)
    print(f"slipstream up: {name} did not finish; the same command continues it", file=sys.stderr)
    return EXIT_BAD_INPUT if child.exit_code == EXIT_BAD_INPUT else 1
