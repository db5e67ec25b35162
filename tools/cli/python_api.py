"""`slipstream.train`: a run from a script or a notebook, by the same processes as those of `slipstream up`."""

import ast
import inspect
import os
import symtable
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.process.config_error import ConfigError, require
from slipstream.common.process.connection import without_password
from slipstream.common.process.output import held, write_whole
from slipstream.common.process.run_dir import RunDir, find_run
from slipstream.tools.run.child import EXIT_BAD_INPUT, Child, verb_command
from slipstream.tools.run.up import next_commands
from slipstream.tools.see.report_page import REPORT, page, report_of
from slipstream.tools.see.summary import read_summary

POLL_S = 0.2
GIVEN = "given.yaml"  # the file in the run's folder with the settings
OWN_MODULE = "from_main"  # the file in the run's folder with what the script or the notebook defines

FUTURE = "__future__"  # its imports change how all else is read
_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)

Own = str | Callable[..., Any]  # `module:NAME`, or what is there


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run that has ended."""

    path: Path

    @property
    def model_path(self) -> Path:
        """The exported model, a Hugging Face folder."""
        return RunDir(self.path.parent, self.path.name).trained_model

    @property
    def success(self) -> float | None:
        """The trained model's sampled success on held-out tasks; None without an evaluation."""
        summary = read_summary(RunDir(self.path.parent, self.path.name))
        final = summary.eval.get("final") if summary else None  # beside those of the initial model and the warm start
        return final.sampled if final else None

    def report(self) -> Path:
        """Write the page about the run, and return its path."""
        write_whole(self.path / REPORT, page(report_of([self.path])))
        return self.path / REPORT


def train(
    model: str | Path = "",
    *,
    env: Own = "",
    reward: Own | Sequence[Own] = (),
    dataset: str | Path = "",
    agent: Own = "",
    steps: int | None = None,
    name: str = "",
    config: str | Path | Sequence[str | Path] = (),
    **settings: object,
) -> TrainedRun:
    """Train `model`, the tiny one if it is empty, and return the run when it has ended.

    `env`, `reward` and `agent` are classes and functions of yours, or their `module:NAME`. `config` names YAML files,
    `settings` single keys, as in `**{"optim.lr": 1e-5}`. Raises ConfigError for a mistake, RuntimeError for a run that
    has failed, and KeyboardInterrupt, after an orderly end, for Ctrl-C.
    """
    for key, value in (("model", model), ("dataset", dataset)):
        require(isinstance(value, str | Path | None), key, "a path", type(value).__name__, "save it, and give its path")
    settings = {"run.name": name or time.strftime("run-%Y%m%d-%H%M%S"), **settings}
    files = [str(config)] if isinstance(config, str | Path) else list(map(str, config))
    loaded = load_config(None, [], presets=[*files, _nested(settings)])
    run_dir, main = RunDir(loaded.run.root, loaded.run.name), _Main()
    given: dict[str, object] = {"model.path": str(model)} if model else {}
    if steps is not None:
        given["learner.steps"] = steps
    if dataset:
        given |= {"env.name": "dataset", "env.options.train": str(dataset)}
    if agent:
        given |= {"env.name": "agent", "env.options.agent": main.place(agent)}
    if env:
        given["env.name"] = main.place(env)
    rewards = [reward] if isinstance(reward, str) or callable(reward) else reward or ()
    require(isinstance(rewards, list | tuple), "reward", "a function, or a list of them", reward, "give each")
    places = list(map(main.place, rewards))
    keys = {f"env.rewards.{place.rpartition(':')[2]}": place for place in places}
    require(len(keys) == len(places), "reward", "functions of different names", ", ".join(places), "rename one")
    given |= {f"{key}.part": place for key, place in keys.items()}
    if dataset and keys and not (env or agent or "check" in loaded.env.options):  # the first reward is the score
        given |= {"env.options.check": "none", f"{next(iter(keys))}.success_from": 1.0}
    loaded = load_config(None, [], presets=[*files, _nested(given | settings)])
    if run_dir.config.exists():
        raise ConfigError(f"run {run_dir.path.name!r} exists in {run_dir.path.parent}; choose another `name`")
    run_dir.create()
    with held(run_dir.path / GIVEN):  # two scripts that start in one second have the same name
        _run(loaded, run_dir, main)
    return TrainedRun(path=find_run(run_dir.path.name, loaded.run.root).path)


def _run(config: Config, run_dir: RunDir, main: "_Main") -> None:
    """Start `slipstream up`, and print what it prints until it has ended."""
    config.redis.url = without_password(config.redis.url)
    given = run_dir.path / GIVEN
    write_whole(given, dump_config(config))
    if main.source:
        write_whole(run_dir.path / f"{OWN_MODULE}.py", main.source)
    folders = [str(run_dir.path.resolve()), sys.path[0] or str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    # A Jupyter kernel sets FORCE_COLOR, by which `up` would draw its live view into the log.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "FORCE_COLOR": ""}
    up = Child("the run", verb_command("up", str(given)), log=run_dir.log("up"), environment=environment)
    is_interrupted = False
    up.start()
    with up.log.open(encoding="utf-8", errors="replace") as log:
        while True:
            try:
                is_over = up.exit_code is not None
                print(log.read(), end="", flush=True)
                if is_over:
                    break
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                is_interrupted = True
                up.ask_to_end()  # at once, if it is the second time
    if is_interrupted:
        again = next_commands(config, run_dir, is_finished=False)["continue"]
        raise KeyboardInterrupt(f"`{again}` continues the run" if run_dir.config.exists() else "before the run began")
    if up.exit_code == EXIT_BAD_INPUT:
        raise ConfigError(up.last_log_lines())
    if up.exit_code:
        raise RuntimeError(f"the run ended with code {up.exit_code}; its logs are in {up.log.parent}")


def _nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """Sections with their keys, of settings by `section.key`."""
    sections: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, key = path.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return sections


class _Main:
    """What the processes of a run need of the script or notebook that starts it."""

    def __init__(self) -> None:
        self.source = ""  # of a module with the definitions
        self._names: list[str] = []

    def place(self, own: Own) -> str:
        """`module:NAME` of a class or function, which other processes can import. Raises ConfigError."""
        if isinstance(own, str):
            return own
        name, module = getattr(own, "__qualname__", ""), getattr(own, "__module__", "")
        if not name.isidentifier():
            raise ConfigError(
                f"{own!r} cannot be imported by other processes; give a class or function from the top of a module"
            )
        if module != "__main__":
            return f"{module}:{name}"
        self._names.append(name)
        self.source = definitions(_source_of_main(), self._names)
        return f"{OWN_MODULE}:{name}"


def _source_of_main() -> str:
    """The script, or all cells of the notebook that ran without an error of syntax."""
    main = sys.modules["__main__"]
    cells = getattr(main, "In", None)
    if cells is None:
        try:
            return inspect.getsource(main)
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"this program has no file to read its definitions from ({error}); use a module"
            ) from None
    return "\n".join(cell for cell in cells if _parses(cell))


def _parses(cell: str) -> bool:
    try:
        ast.parse(cell)
    except SyntaxError:  # it has magics
        return False
    return True


def definitions(source: str, names: Sequence[str]) -> str:
    """What `source` defines as `names` at its top, with the imports, definitions and constants that these need.

    Raises ConfigError for one that is not there, and for what they need from inside of a block.
    """
    places: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(source).body:
        places |= {name: [statement] for name in _bound(statement)}
        for name in _changed(statement):
            if not (isinstance(statement, ast.Expr) and isinstance(places.get(name, [statement])[0], _IMPORTS)):
                places.setdefault(name, []).append(statement)
    missing = [name for name in names if name not in places]
    if missing:
        raise ConfigError(f"{missing[0]} is not defined at the top of the script or of a cell; move it there")
    needed, queue = set(), [FUTURE, *names]
    while queue:
        for found in places.get(name := queue.pop(), []):
            if isinstance(found, _BLOCKS):
                raise ConfigError(
                    f"{name} is set inside of `{ast.unparse(found).splitlines()[0]}`, which is not copied for the "
                    "processes of the run; set it at the top of the script or of a cell, or in a module"
                )
            if found not in needed:
                needed.add(found)
                queue += _needs(found)
    return "\n\n".join(map(ast.unparse, sorted(needed, key=lambda each: (each.lineno, each.col_offset)))) + "\n"


def _needs(statement: ast.stmt) -> set[str]:
    """The names of the module that a statement uses; names of its functions are none."""
    tables = [symtable.symtable(ast.unparse(statement), OWN_MODULE, "exec")]
    found = {symbol.get_name() for symbol in tables[0].get_symbols()}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return found


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement defines; none of one that does more than define."""
    match statement:
        case ast.ImportFrom(module="__future__"):
            return [FUTURE]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [(alias.asname or alias.name).partition(".")[0] for alias in names]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets, value=value):
            read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            set_ones = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            return [node.id for node in set_ones if isinstance(node.ctx, ast.Store) and node.id not in read]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _changed(statement: ast.stmt) -> set[str]:
    """The names that a statement sets, also in a block, or changes by an item, an attribute or a method."""
    found = set[str]()
    for node in () if isinstance(statement, _DEFINITIONS) else ast.walk(statement):
        match node:
            case ast.alias(name=name, asname=other):
                found.add((other or name).partition(".")[0])
            case ast.Name() | ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
                found.add(_root(node))
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                found.add(_root(method))
    return found


def _root(node: ast.expr) -> str:
    """The name that an expression such as `name.field[0]` begins with; empty if it begins with something else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
