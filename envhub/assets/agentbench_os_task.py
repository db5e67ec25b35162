"""AgentBench's operating system tasks, read from their files, and which of them work in the sandbox."""

import logging
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.envhub.user_files import read_json

# Commands in a task's scripts that do not work in a sandbox without other users, network and a stable clock.
_NOT_HERE = {
    "act as another user": "su|sudo|runuser|chown|chgrp|passwd|chpasswd|setfacl",
    "install packages": "apt|apt-get|dpkg|snap|pip|pip3",
    "use the network": "curl|wget|ping|netstat|ss|ip|ifconfig|ssh|nc",
    "are about processes or the state of the machine": (
        "ps|pgrep|pkill|kill|killall|top|htop|lsof|free|uptime|who|w|last|df|service|systemctl|crontab|at|nohup|jobs"
    ),
}
_AS_A_COMMAND = r"(?:^|[;|&(`]|\b(?:do|then|else|xargs|exec|watch)\b)[ \t]*"
_WORDS = {
    why: re.compile(rf"{_AS_A_COMMAND}(?:{commands})(?![\w./=-])", re.MULTILINE) for why, commands in _NOT_HERE.items()
} | {
    "are about when files were changed": re.compile(
        r"-[mac](?:time|min)\b|-newer|\btouch -[dt]|-c ?[\"']?%[xyzXYZ]|\bls -[a-zA-Z]*t"
    ),
    "need bits of a mode beyond 777": re.compile(r"\bchmod (?:-R )?(?:[ugoa]*\+[st]|[1-7][0-7]{3})\b"),
    "are made by chance": re.compile(r"/dev/u?random|\bshuf\b"),
}
_BACKGROUND = re.compile(r"(?<![&<>|\\])&(?![&>\d])")  # a process in the background
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")

log = logging.getLogger(__name__)


class _Script(msgspec.Struct):
    code: str | None = None
    file: str | None = None  # relative to the folder of scripts
    language: str = "bash"


class _Match(msgspec.Struct):
    answer: str | None = None
    regex: str | None = None


class _Create(msgspec.Struct):
    local: str = "default"  # the name of an image of AgentBench
    image: str | None = None
    init: str | _Script | list[str | _Script] | None = None


class _Evaluation(msgspec.Struct):
    match: str | _Match | None = None
    check: str | _Script | list[str | _Script | None] | None = None
    example: str | _Script | None = None


class _Item(msgspec.Struct):
    """The fields of a task that this environment uses."""

    description: str
    evaluation: _Evaluation
    create: _Create | list[_Script | None] | None = None  # a list is ignored, as in AgentBench
    start: str | _Script | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    code: str
    language: str  # "bash" or "python"

    def command(self, *arguments: str) -> str:
        """Return the command as AgentBench runs it: in /, the first argument in `$1` or `sys.argv[1]`."""
        if self.language == "python":
            return shlex.join(["/usr/bin/python3", "-I", "-c", self.code, *arguments])
        return shlex.join(["/usr/bin/bash", "-c", self.code, "--", *arguments])

    def seeded(self) -> "Script":
        """Return the script with a fixed seed of bash's $RANDOM, so that every attempt starts the same."""
        return Script(code=f"RANDOM=1\n{self.code}", language="bash") if self.language == "bash" else self


@dataclass(frozen=True, kw_only=True, slots=True)
class OsTask:
    """A task, judged by an exact `answer`, by a `regex` that matches in it, or by `checks` (None is the example)."""

    name: str  # the file and the task's number in it
    description: str
    init: tuple[Script, ...] = ()
    answer: str | None = None
    regex: str | None = None
    checks: tuple[Script | None, ...] = ()
    example: Script | None = None  # does the task, or prints its answer

    @property
    def compares_output(self) -> bool:
        """Whether an answer is compared with the output of the example."""
        return None in self.checks


class _NotPlayableError(ValueError):
    """The task does not work here, with the reason."""


def read_tasks(path: Path) -> tuple[OsTask, ...]:
    """Return the tasks of a file, or of the files in a folder or its subfolders, that work here.

    Logs how many are left out, and why. Raises ValueError for malformed files, and if no task is left.
    """
    tasks: list[OsTask] = []
    reasons: list[str] = []
    files = [path] if path.is_file() else sorted(path.glob("*/*.json")) or sorted(path.glob("*.json"))
    for file in files:
        read = read_json(file, list[_Item] | _Item)  # type: ignore[arg-type]  # msgspec takes unions
        for number, item in enumerate(read if isinstance(read, list) else [read]):
            try:
                tasks.append(_task(item, name=f"{file}, task {number}", scripts=_scripts_of(file)))
            except _NotPlayableError as why:
                reasons.append(str(why))
    counted = ", ".join(f"{reasons.count(why)} that {why}" for why in sorted(set(reasons)))
    if not tasks:
        raise ValueError(f"{path} has no task that works in the sandbox: {counted or 'it has no JSON file'}")
    if reasons:
        log.warning("%s: left out %d of %d tasks: %s", path, len(reasons), len(tasks) + len(reasons), counted)
    return tuple(tasks)


def _scripts_of(file: Path) -> Path:
    """Return the folder of a file's scripts: scripts/7 for data/7/x.json, scripts/dev for data/dev.json."""
    is_numbered = file.parent.name != "data"
    data, name = (file.parent.parent, file.parent.name) if is_numbered else (file.parent, file.stem)
    return data.parent / "scripts" / name


def _task(item: _Item, *, name: str, scripts: Path) -> OsTask:
    """Return the task. Raises _NotPlayableError if it does not work here."""
    create = item.create if isinstance(item.create, _Create) else _Create()
    if create.image is not None or create.local != "default":
        raise _NotPlayableError("need a special image")
    if item.start is not None:
        raise _NotPlayableError("start a program in the background")
    inits = create.init if isinstance(create.init, list) else [create.init]
    evaluation = item.evaluation
    checks = evaluation.check if isinstance(evaluation.check, list) else [evaluation.check]
    example = None if evaluation.example is None else _script(evaluation.example, scripts)
    init = tuple(_script(script, scripts) for script in inits if script is not None)
    if evaluation.match is not None:
        match = _Match(answer=evaluation.match) if isinstance(evaluation.match, str) else evaluation.match
        if match.answer is None and match.regex is None:
            raise _NotPlayableError("have no answer and no checks")
        try:
            re.compile(match.regex or "")
        except re.error:
            raise _NotPlayableError("have a malformed regex") from None
        task = OsTask(name=name, description=item.description, init=init, answer=match.answer, regex=match.regex)
    else:
        if evaluation.check is None or (None in checks and example is None):
            raise _NotPlayableError("have no answer and no checks")
        read = tuple(None if script is None else _script(script, scripts) for script in checks)
        task = OsTask(name=name, description=item.description, init=init, checks=read, example=example)
    for script in (*task.init, *task.checks, task.example):
        if script is not None:
            _check_playable(script)
    return task


def _script(script: str | _Script, scripts: Path) -> Script:
    if isinstance(script, str):
        return Script(code=script, language="bash")
    if script.language not in ("bash", "python"):
        raise _NotPlayableError(f"have a script in {script.language}")
    if script.code is not None:
        return Script(code=script.code, language=script.language)
    path = scripts / (script.file or "")
    if not script.file or not path.is_file() or not path.resolve().is_relative_to(scripts.resolve()):
        raise _NotPlayableError("have a script that is not in the folder of scripts")
    return Script(code=path.read_text(encoding="utf-8"), language=script.language)


def _check_playable(script: Script) -> None:
    lines = "\n".join(line for line in script.code.splitlines() if not line.lstrip().startswith("#"))
    for why, words in _WORDS.items():
        if words.search(lines):
            raise _NotPlayableError(why)
    if script.language == "bash" and _BACKGROUND.search(_QUOTED.sub("", lines)):
        raise _NotPlayableError("start a program in the background")
