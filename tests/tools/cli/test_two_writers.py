"""Two commands that write one output at once: the second is refused, and nothing is lost."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.output import appended, held, whole_file, whole_folder, write_json, write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records import frame_file
from slipstream.learner.checkpoint.fence import Fence
from slipstream.learner.checkpoint.sealed_file import write_sealed
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.step_tokens import StepTokens, write_tokens
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.tools.cli.cli import main
from slipstream.tools.cli.verb_table import VERBS
from slipstream.tools.data.row_files import write_rows
from tests.processes import python
from tests.tools.cli.verbs import Output

ROWS = '{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n'
FIT = "run.root=runs run.name=new model.path=model --data=rows.jsonl"
# What each verb writes, and a command of it in the folder of `place`.
WRITE = {
    "up": ("runs/new", "up run.root=runs run.name=new"),
    "view": ("report.html", "view old run.root=runs --file report.html --force"),
    "track": ("runs/old/tracked_by_wandb.json", "track run.root=runs run.name=old --to wandb"),
    "launch": ("launch/new", "launch ray run.name=new redis.url=redis://127.0.0.1:1"),
    "replay export": ("out.jsonl", "replay export out.jsonl --force run.root=runs run.name=old"),
    **{f"fit {goal}": ("runs/new", f"fit {goal} {FIT}") for goal in ("sft", "dpo", "reward", "prm")},
    "data": ("out.jsonl", "data out.jsonl --data=rows.jsonl --force"),
    "export": ("runs/old/trained_model/README.md", "export run.root=runs run.name=old"),
    "collect": ("out.jsonl", "collect out.jsonl --force --expert run.root=runs run.name=old"),
}
ROAD = ("runs/way", "up road.yaml")  # a file of stages
READ = {"runs", "top", "simulate", "scale", "eval", "doctor", "actors", "plan"}
READ |= {"replay audit", "replay groups", "replay show", "replay failures", "replay quarantined"}
READ |= {"replay repair", "replay quarantine", "replay requeue"}  # what they change is in Redis
READ |= {"serve judge", "serve relay", "serve envs", "serve rewards", "access users", "access join"}
FENCED = {"learner"}  # a newer process takes over, also that of a re-run
# They never replace a file, so the second of two finds that it exists.
NEW_ONLY = {"access key", "init env", "init agent", "init data"}


def own_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class Ended(Exception):
    """The first command is ended when the second one was refused."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, a run that has a model, a road and the templates of `launch`."""
    run = tmp_path / "runs/old"
    (run / "trained_model").mkdir(parents=True)
    (run / "trained_model/model.safetensors").write_bytes(b"weights")
    (run / "config.yaml").write_text("run: {name: old}\n")
    for name in ("rows.jsonl", "out.jsonl"):
        (tmp_path / name).write_text(ROWS)
    stages = "[{expert: collect --num-tasks=1 --expert}, {imitate: fit sft --data=@expert}]"
    (tmp_path / "road.yaml").write_text(f"{{settings: [run.root=runs, run.name=way], stages: {stages}}}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_verb_is_known_to_write_or_to_read() -> None:
    assert WRITE.keys() | READ | FENCED | NEW_ONLY == VERBS.keys()


@pytest.mark.parametrize(("verb", "target", "command"), [*((verb, *how) for verb, how in WRITE.items()), ("up", *ROAD)])
def test_the_second_of_two_commands_that_write_one_output_is_refused(
    verb: str, target: str, command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    codes, pwrite = list[int](), os.pwrite

    def second_begins(descriptor: int, data: bytes, offset: int) -> int:
        """The lock of the first command has just got its name."""
        pwrite(descriptor, data, offset)
        before = files(place)
        codes.append(main(command.split()))
        assert files(place) == before
        raise Ended

    monkeypatch.setattr(os, "pwrite", second_begins)
    with pytest.raises(Ended):
        main(command.split())
    assert codes == [2]
    complaint = capsys.readouterr().err.replace(f"{place}/", "")
    assert f"slipstream {verb}: {own_process()} is writing {target}; wait for it, or end it" in complaint


def test_a_lock_ends_with_its_process_and_leaves_no_file(tmp_path: Path) -> None:
    code = "import pathlib, sys; from slipstream.common.process.output import held\n"
    code += "with held(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        refusal = f"^process {other.pid} on .* is writing {tmp_path}/out; wait for it"
        with pytest.raises(ConfigError, match=refusal), held(tmp_path / "out"):
            pass
        other.kill()
        other.wait()
        with held(tmp_path / "out"), held(tmp_path / "other"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_learner_that_was_fenced_out_names_the_process_of_its_successor(tmp_path: Path) -> None:
    first, second = Fence(tmp_path / "checkpoints"), Fence(tmp_path / "checkpoints")
    first.take()
    second.take()
    with pytest.raises(FencedOut, match=f"another learner has taken over {tmp_path}, {own_process()}: "), first.held():
        pass


def archived(path: Path) -> None:
    step = ArchivedStep(step=1, policy_version=0, conditions={}, groups=[])
    ArchiveWriter(path.parent, "run", epoch=1).append(step)


def _write_bytes(path: Path, content: bytes) -> None:
    with whole_file(path) as file:
        file.write(content)


TOKENS = StepTokens(policy_version=0, sequences=[])
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "text": ("summary.json", lambda path: write_whole(path, "new")),
    "JSON": ("fit.json", lambda path: write_json(path, {})),
    "a sealed file": ("tally.json", lambda path: write_sealed(path, TOKENS, schema=1)),
    "rows": ("rows.jsonl", lambda path: write_rows(path, [{"task": "a"}])),
    "rows of parquet": ("rows.parquet", lambda path: write_rows(path, [{"task": "a"}])),
    "episodes": ("demonstrations.bin", lambda path: frame_file.write(path, [])),
    "an archived step": ("step_000001.epoch_1.bin", archived),
    "tokens of a step": ("step_000001.rank_0.bin", lambda path: write_tokens(path.parent, TOKENS, step=1, rank=0)),
    "a whole file": ("config.json", lambda path: _write_bytes(path, b"new")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_replaces_its_name_and_nothing_that_a_link_leads_to(kind: str, tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "run" / name
    path.parent.mkdir()
    for link in (path, path.with_name(f"{name}.tmp"), path.with_suffix(".tmp")):
        link.symlink_to(precious)
    write(path)
    assert precious.read_text() == "precious" and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert len(list(path.parent.iterdir())) == 3


def test_writers_of_one_file_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with whole_file(path) as first, whole_file(path) as second:
        first.write(b"first\n" * 9)
        second.write(b"second\n")
    assert path.read_bytes() == b"first\n" * 9 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(Ended), whole_file(path) as third, whole_folder(tmp_path / "model") as folder:
        third.write(b"third")
        (folder / "config.json").write_text("{}")
        raise Ended
    assert path.read_bytes() == b"first\n" * 9 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["out.marks.jsonl", "out.jsonl.lock", "out.jsonl.journal"])
def test_a_file_that_is_continued_is_no_link(name: str, place: Path) -> None:
    (place / "precious").write_text("precious")
    (place / name).symlink_to(place / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        appended(place / name)
    main(["data", "out.jsonl", "--data=rows.jsonl", "--force"])
    assert (place / "precious").read_text() == "precious"


INPUTS = {
    "the file itself": ("out.jsonl", "out.jsonl", "data out.jsonl --force --data=rows.jsonl,out.jsonl"),
    "a link to it": ("out.jsonl", "alias.jsonl", "data out.jsonl --force --data=alias.jsonl"),
    "it by a link": ("alias.jsonl", "out.jsonl", "data alias.jsonl --force --data=out.jsonl"),
    "held-out rows": ("out.held-out.jsonl", "out.held-out.jsonl", "data out.jsonl --force --data=out.held-out.jsonl"),
    "marks": ("out.marks.jsonl", "out.marks.jsonl", "data out.jsonl --force --data=rows.jsonl,out.marks.jsonl"),
    "a server": ("out.jsonl", "alias.jsonl", "collect out.jsonl --force --server=alias.jsonl"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_a_file_that_is_read_is_not_written(case: str, place: Path, refused: Output) -> None:
    target, source, command = INPUTS[case]
    (place / "alias.jsonl").symlink_to("out.jsonl")
    for name in ("out.held-out.jsonl", "out.marks.jsonl"):
        (place / name).write_text(ROWS)
    before = files(place)
    assert f"{target} would replace {source}, which is read; choose another file to write" in refused(*command.split())
    assert files(place) == before


@pytest.mark.parametrize("name", ["out.held-out.jsonl", "out.quarantine.jsonl"])
def test_a_file_beside_a_result_is_neither_replaced_nor_removed_unless_asked(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out.jsonl").unlink()
    (place / name).write_text("precious")
    before, command = files(place), ["data", "out.jsonl", "--data=rows.jsonl"]
    assert main(command) == 2 and files(place) == before
    with held(place / name):
        assert main([*command, "--force"]) == 2
    errors = capsys.readouterr().err
    assert f"{name} exists; choose another file" in errors and f"{own_process()} is writing {name}; wait" in errors
    assert files(place) == before


def test_only_its_owner_can_open_the_directory_of_a_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs", "new")
    before = os.umask(0o022)
    try:
        run_dir.create()
        appended(run_dir.path / "rows.jsonl").close()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (run_dir.path.parent, run_dir.path)] == [0o755, 0o700]
    assert (run_dir.path / "rows.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    done = python("-P", "-m", "slipstream.tools.cli.start", "runs", f"run.root={tmp_path}/none")
    assert done.returncode == 0 and done.stdout.startswith(f"there are no runs under {tmp_path}/none/; start one")
