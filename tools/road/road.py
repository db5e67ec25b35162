"""`slipstream road`: from a base model to an agent in stages, each a verb of its own, with an evaluation after each.

A stage is the process, or the two, that a person would start by hand. What has finished is recorded in `road.json`, so
the same command continues a road that was stopped.
"""

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.common.config.config import Config, differences, dump_config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.printable import printable
from slipstream.common.process.run_dir import write_whole
from slipstream.common.process.shutdown import Shutdown
from slipstream.tools.road.road_file import BASE, TRAINING, Road, Stage, check_road, read_road
from slipstream.tools.road.road_report import (
    Done,
    Records,
    evaluation_of,
    load_records,
    outcome_of,
    print_summary,
    report_line,
    save_records,
    write_summary,
)
from slipstream.tools.run.child import EXIT_BAD_INPUT, Child, kill, print_failure
from slipstream.tools.terminal.options import as_arguments

POLL_S = 0.2
PROGRESS_S = 15.0  # between two lines of progress
TAIL_BYTES = 4096
GRACE_S = 120.0  # after SIGTERM, beside the actors' drain: until a stage has written its checkpoint
CLI = (sys.executable, "-P", "-m", "slipstream.tools.cli.cli")
PREPARE = (sys.executable, "-P", "-m", "slipstream.tools.run.prepare")


class Stopped(Exception):
    """A stage did not finish: it failed, or a signal ended it. The reason has been printed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def road(config: Config, *, path: str, overrides: Sequence[str], dry_run: bool) -> int:
    """Run every stage that has not finished, and print the summary; return the exit code. Raises ConfigError."""
    if config.model.path:  # its folder: it may have been an id of the Hub
        overrides = [*overrides, f"model.path='{config.model.path}'"]
    whole = read_road(path, overrides)
    if dry_run:
        check_road(whole, first=0)
        _print_plan(whole)
        return 0
    return walk_road(whole)


def walk_road(whole: Road, *, cli: Sequence[str] = CLI, prepare: Sequence[str] = PREPARE) -> int:
    """`cli` and `prepare` begin the commands of the stages, and of the tiny model."""
    records = load_records(whole.run_dir.path)
    done = _checked(whole, records)
    shutdown = Shutdown(at_once=lambda: kill(psutil.Process().children(recursive=True)))
    walk = _Walk(whole=whole, records=records, shutdown=shutdown, cli=tuple(cli), prepare=tuple(prepare))
    try:
        if BASE not in done:
            walk.begin_with_base()
        for stage in whole.stages:
            if stage.name not in done:
                walk.finish(stage)
    except Stopped as stopped:
        return stopped.exit_code
    write_summary(whole, records)
    print_summary(whole, records)
    return 0


def _checked(whole: Road, records: Records) -> set[str]:
    """The names of the stages that have finished. Raises ConfigError if their settings have changed since.

    What has not finished is checked as far as it can be before it starts.
    """
    known = records.stages
    for stage in whole.stages:
        saved = config_of(whole, stage.name)
        if stage.name not in known:
            if stage.run_dir.config.exists():
                raise ConfigError(
                    f"stage {stage.name!r}: {stage.run_dir.path} exists and does not belong to this road; choose "
                    "another `run.name`, or remove it"
                )
            continue
        changes = differences(load_config(str(saved), []), stage.config)
        if known[stage.name].options != _options(stage):
            changes.append(f"options: {known[stage.name].options} -> {_options(stage)}")
        if changes:
            raise ConfigError(
                f"stage {stage.name!r} has begun with other settings: {'; '.join(changes)}; choose another `run.name`, "
                "or undo the change"
            )
    done = {name for name, record in known.items() if record.finished}
    missing = [index for index, stage in enumerate(whole.stages) if stage.name not in done]
    check_road(whole, first=missing[0] if missing else len(whole.stages))
    return done


def _options(stage: Stage) -> list[str]:
    return [argument for options in (stage.collect, stage.fit) if options for argument in as_arguments(options)]


def config_of(whole: Road, name: str) -> Path:
    """The file with the whole configuration of a stage."""
    return whole.run_dir.path / f"{name}.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """Runs stages one after another."""

    whole: Road
    records: Records
    shutdown: Shutdown
    cli: tuple[str, ...]
    prepare: tuple[str, ...]

    def begin_with_base(self) -> None:
        """Make the tiny model, if there is no other, and evaluate the base model."""
        self.whole.run_dir.path.mkdir(parents=True, exist_ok=True)
        write_whole(self._evaluation_config, dump_config(self.whole.config))
        record = self._begin(BASE, BASE, [], self.whole.base)
        with self._counted(record):
            if not self.whole.config.model.path:
                self._run(BASE, [*self.prepare, str(config_of(self.whole, BASE))])
        self._end(BASE, record, self.whole.base_model)

    def finish(self, stage: Stage) -> None:
        """Run what is missing of a stage, evaluate its model if it trained one, and record it as finished."""
        record = self._begin(stage.name, stage.kind, _options(stage), stage.config)
        with self._counted(record):
            self._collect(stage)
            self._train(stage)
        outcome = outcome_of(stage)
        record.tokens_played, record.tokens_trained, record.note = outcome.played, outcome.trained, outcome.note
        self._end(stage.name, record, stage.run_dir.trained_model if stage.kind in TRAINING else None)

    @property
    def _evaluation_config(self) -> Path:
        return config_of(self.whole, "evaluation")

    def _begin(self, name: str, kind: str, options: list[str], config: Config) -> Done:
        write_whole(config_of(self.whole, name), dump_config(config))
        record = self.records.stages.setdefault(name, Done(kind=kind, options=options))
        save_records(self.whole.run_dir.path, self.records)
        place = 0 if name == BASE else [stage.name for stage in self.whole.stages].index(name) + 1
        print(f"stage {place} of {len(self.whole.stages)}, {name} ({kind}): {self._log(name)}", flush=True)
        return record

    @contextlib.contextmanager
    def _counted(self, record: Done) -> Iterator[None]:
        """Add the time of the block to the record, also if the stage does not finish."""
        started = time.monotonic()
        try:
            yield
        finally:
            record.seconds += time.monotonic() - started
            save_records(self.whole.run_dir.path, self.records)

    def _collect(self, stage: Stage) -> None:
        """Collect the rows of a stage, unless they are complete."""
        if stage.collect is None or stage.rows.exists():
            return
        half = stage.rows.with_name(f"{stage.name}-unfinished.jsonl")  # if the engine dies, it has only some rows
        config = str(config_of(self.whole, stage.name))
        self._run(stage.name, [*self.cli, "collect", str(half), config, "--force", *as_arguments(stage.collect)])
        half.replace(stage.rows)

    def _train(self, stage: Stage) -> None:
        """Train what the stage trains. A run that has begun continues from its newest checkpoint."""
        config, run = str(config_of(self.whole, stage.name)), stage.config.run
        if stage.fit is not None:
            verb = "sft" if stage.kind == "rejection" else stage.kind
            self._run(stage.name, [*self.cli, verb, config, *as_arguments(stage.fit)])
        elif stage.kind == "rl" and stage.run_dir.config.exists():
            self._run(stage.name, [*self.cli, "up", "--resume", run.name, f"run.root={run.root}"])
        elif stage.kind == "rl":
            self._run(stage.name, [*self.cli, "up", config])

    def _end(self, name: str, record: Done, model: Path | None) -> None:
        """Evaluate `model` with the shared configuration, and record that the stage has finished."""
        if model is not None:
            output = self.whole.run_dir.path / f"{name}-evaluation.jsonl"
            command = [*self.cli, "eval", str(self._evaluation_config), f"model.path='{model}'"]
            self._run(name, command, output=output)
            record.model, record.evaluation = str(model), evaluation_of(output)
        record.finished = True
        save_records(self.whole.run_dir.path, self.records)
        write_summary(self.whole, self.records)
        print(f"  {report_line(self.records, name)}", flush=True)

    def _log(self, name: str) -> Path:
        return self.whole.run_dir.log(name)

    def _run(self, name: str, command: Sequence[str], *, output: Path | None = None) -> None:
        """Run one process to its end. Raises Stopped unless it ends with code 0."""
        child = Child(f"stage {name!r}", command, log=self._log(name), environment={}, output=output)
        child.start()
        shown, shown_at = _newest_line(child.log), time.monotonic()
        try:
            while child.exit_code is None:
                if self.shutdown.requested.wait(POLL_S):
                    print(f"stopping stage {name!r}; press Ctrl-C again to stop at once", flush=True)
                    break
                if time.monotonic() - shown_at > PROGRESS_S:
                    shown, shown_at = _show_progress(child, shown), time.monotonic()
        finally:
            child.ask_to_end()
            child.wait(self.whole.config.actors.drain_s + GRACE_S)
        if self.shutdown.requested.is_set():
            raise Stopped(self.shutdown.exit_code)
        if child.exit_code:
            print_failure("road", child)
            print(f"slipstream road: {name} did not finish; the same command continues it", file=sys.stderr)
            raise Stopped(EXIT_BAD_INPUT if child.exit_code == EXIT_BAD_INPUT else 1)


def _show_progress(child: Child, shown: str) -> str:
    """Print the newest line of the log if it is not `shown`; return it."""
    newest = _newest_line(child.log)
    if newest != shown:
        print(f"  {printable(newest)}", flush=True)
    return newest


def _newest_line(path: Path) -> str:
    """The last complete line of a log that is not empty."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = re.split(r"[\r\n]", log.read().decode(errors="replace"))[:-1]
    return next((line for line in reversed(lines) if line.strip()), "")


def _print_plan(whole: Road) -> None:
    """Print each stage, its options, and the settings that differ from the shared ones."""
    print(f"base model: {whole.base_model}")
    for place, stage in enumerate(whole.stages, start=1):
        print(f"stage {place} of {len(whole.stages)}, {stage.name} ({stage.kind}) {' '.join(_options(stage))}".rstrip())
        for change in differences(whole.config, stage.config):
            print(f"  {change}")
