"""`slipstream view RUN`: look into what a run was trained on, in a browser, from its archive on disk."""

from collections.abc import Sequence
from pathlib import Path

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.data.row_files import check_writable
from slipstream.tools.see.runs import find_run
from slipstream.tools.viewer.pages import Pages
from slipstream.tools.viewer.server import serve
from slipstream.tools.viewer.single_file import write_file
from slipstream.tools.viewer.view_options import ViewOptions


def view(config: Config, *, runs: Sequence[str], force: bool, options: ViewOptions) -> int:
    """Serve the page of the run, or write it to options.file; return 0. Raises ConfigError, NotRecorded."""
    if len(runs) > 1:
        raise ConfigError(f"`slipstream view` shows one run, got {', '.join(runs)}; start it once for each")
    run_dir = find_run(runs[0] if runs else config.run.name, config.run.root)
    if not run_dir.config.is_file():
        raise ConfigError(f"{run_dir.config} does not exist; give the directory of a run")
    if options.file:
        _check_target(Path(options.file), run_dir, force=force)
    elsewhere = [f"model.path={config.model.path}"] if config.model.path else []
    pages = Pages(load_config(str(run_dir.config), elsewhere), run_dir)
    if options.file:
        print(f"view: {write_file(pages, Path(options.file), steps=_steps(pages, options.steps))}")
    else:
        serve(pages, port=options.port)
    return 0


def _check_target(target: Path, run_dir: RunDir, *, force: bool) -> None:
    """Raise ConfigError unless the page can be written to `target`, which must not be among the files of the run."""
    if target.resolve().is_relative_to(run_dir.path.resolve()):
        raise ConfigError(f"--file {target} is in the directory of the run, {run_dir.path}; choose another folder")
    check_writable(target, force=force)


def _steps(pages: Pages, wanted: str) -> list[int]:
    """The archived steps among those that are wanted; the newest by default. Raises ConfigError if there is none."""
    if not wanted:
        return pages.steps[-1:]
    first, last = map(int, wanted.split(":"))
    found = [step for step in pages.steps if first <= step <= last]
    if not found:
        raise ConfigError(
            f"--steps {wanted} has no archived step; the archive has {pages.steps[0]} to {pages.steps[-1]}"
        )
    return found
