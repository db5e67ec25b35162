"""Files of a run that are not what was written: a resumed learner has its books right, or says which file and the cure.

One run of real steps on a real server, whose actor is a stand-in, is damaged in every file and every way.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect
from slipstream.common.process.metrics import MetricsWriter
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.model_folder import folder_root
from slipstream.learner.checkpoint.checkpoint import finished_checkpoints, latest_checkpoint
from slipstream.learner.lead.tally import load_highest_version, load_tally
from slipstream.learner.learn import _recover, learn
from slipstream.learner.learner import load_learner
from slipstream.learner.ranks.ranks import Ranks
from slipstream.replay.buffer.audit import audit
from slipstream.replay.records.ledger import read_ledger
from slipstream.replay.run.archive import Archive, ArchiveWriter
from slipstream.replay.server.redis_server import Server
from slipstream.tools.run.prepare import prepare
from tests.learner.checkpoint.test_checkpoint_settle import stand_in
from tests.processes import GUESS, PLAYED_BY_OTHERS

GROUPS_PER_STEP = 4
SETTINGS = [*GUESS, *PLAYED_BY_OTHERS]
SETTINGS += ["replay.max_lag=1000", "learner.checkpoint_every=2", "learner.keep_checkpoints=9"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ARun:
    """A finished run that can be continued."""

    settings: list[str]
    ranks: Ranks
    server: Server

    def config(self, num_steps: int) -> Config:
        return load_config(None, [*self.settings, f"learner.steps={num_steps}"])

    @property
    def dir(self) -> RunDir:
        config = self.config(2)
        return RunDir(config.run.root, config.run.name)

    def go_on(self, num_steps: int) -> None:
        with stand_in(self.server, self.dir.path.name):
            assert learn(self.config(num_steps), self.dir, ranks=self.ranks, shutdown=Shutdown())


@pytest.fixture(scope="module")
def finished(redis_server: Server, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> ARun:
    """It made four steps, and has checkpoints of the steps 0, 2 and 4."""
    root = tmp_path_factory.mktemp("runs")
    settings = [*SETTINGS, f"run.root={root}", "run.name=damaged", f"redis.url='{redis_server.secret_url}'"]
    run = ARun(settings=settings, ranks=ranks, server=redis_server)
    prepare(run.config(4))
    run.go_on(4)
    return run


# --- Ways to damage a file.


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(20):
        data[len(data) * place // 20] ^= 1 << 7
    path.write_bytes(bytes(data))


def a_digit_changed(path: Path) -> None:
    """Still what it looks like: the last digit of a text, or a bit of the last byte."""
    data = bytearray(path.read_bytes())
    place = max((place for place, byte in enumerate(data) if chr(byte).isdigit()), default=len(data) - 1)
    data[place] ^= 1
    path.write_bytes(bytes(data))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def missing(path: Path) -> None:
    path.unlink()


DAMAGES = [flipped, a_digit_changed, truncated, empty, a_folder, a_dangling_link, missing]
IN_CI = (a_digit_changed, truncated, missing)


def test_a_run_whose_newest_checkpoint_is_lost_continues_from_an_older_one_with_a_balanced_ledger(
    finished: ARun, caplog: pytest.LogCaptureFixture
) -> None:
    def shards(step: int) -> str:
        return folder_root(checkpoints / f"step_{step:06d}")

    checkpoints = finished.dir.checkpoints
    whole = shards(4)
    flipped(next((checkpoints / "step_000004").glob("*.safetensors")))
    finished.go_on(6)
    assert "step_000004" in caplog.text and "does not match its hash" in caplog.text
    assert "the checkpoint of step 4 is lost: making steps 3 to 4 again from the archive" in caplog.text
    assert shards(4) == whole, "made again, bit for bit"
    whole = shards(6)
    shutil.rmtree(checkpoints / "step_000006")
    shutil.rmtree(checkpoints / "step_000004")
    finished.go_on(8)
    assert "the checkpoint of step 6 is lost: making steps 3 to 6 again from the archive" in caplog.text
    assert shards(6) == whole
    whole = shards(8)
    a_folder(checkpoints / "step_000008" / "manifest.json")
    (checkpoints / "step_000010").symlink_to(checkpoints / "step_000006")
    finished.go_on(10)
    assert "the checkpoint of step 8 is lost: making steps 7 to 8 again from the archive" in caplog.text
    assert shards(8) == whole
    assert not (checkpoints / "step_000010").is_symlink() and (checkpoints / "step_000006" / "manifest.json").is_file()
    with connect(finished.server.secret_url) as client:
        ledger = read_ledger(client, "damaged")
        assert ledger.balanced and audit(client, "damaged") == []
        assert ledger.trained == 10 * GROUPS_PER_STEP
    archive = Archive(finished.dir.trajectories, "damaged")
    trained = [group_id for step in archive.steps for group_id in archive.group_ids(step, max_group_bytes=1 << 24)]
    assert archive.steps == list(range(1, 11))
    assert len(trained) == len(set(trained)) == 10 * GROUPS_PER_STEP


# --- Every file of a run.


def resumed(finished: ARun, run_dir: RunDir) -> list[str]:
    """Read all that a learner reads when it comes back, as it does; return hashes of the weights that it has then."""
    config = load_config(str(run_dir.config), [])
    load_tokenizer(run_dir.model)
    learner = load_learner(config, run_dir, finished.ranks)
    try:
        _recover(learner)
    finally:
        learner.checkpoints.close()
    run_dir.start_clock()
    load_tally(run_dir.tally)
    assert load_highest_version(run_dir.highest_version) in (-1, load_highest_version(finished.dir.highest_version))
    ArchiveWriter(run_dir.trajectories, "damaged", epoch=9).cut_after(learner.progress.step)
    MetricsWriter(run_dir, resume_step=learner.progress.step).close()
    return [f"{learner.progress.step}", *(str(value.double().sum().item()) for value in learner.model.parameters())]


@pytest.fixture(scope="module")
def right(finished: ARun, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return resumed(finished, copy_of(finished, tmp_path_factory.mktemp("whole")))


def copy_of(finished: ARun, folder: Path) -> RunDir:
    shutil.copytree(finished.dir.path, folder / "damaged", symlinks=True)
    return RunDir(folder, "damaged")


def files_of(run_dir: RunDir) -> Iterator[Path]:
    """One of each kind; of checkpoints, those of the newest."""
    newest = finished_checkpoints(run_dir.checkpoints)[-1]
    yield from sorted(newest.iterdir())
    yield from (run_dir.tally, run_dir.highest_version, run_dir.path / "started_at", run_dir.config)
    yield from (run_dir.metrics, run_dir.samples)
    yield max(run_dir.trajectories.iterdir())
    yield from sorted(path for path in run_dir.model.iterdir() if path.is_file())


@pytest.mark.parametrize(
    "damage",
    [pytest.param(each, marks=() if each in IN_CI else pytest.mark.long, id=each.__name__) for each in DAMAGES],
)
def test_a_damaged_file_is_mended_or_named_with_the_cure(
    finished: ARun, right: list[str], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    num_files = len(list(files_of(finished.dir)))
    for number in range(num_files):
        run_dir = copy_of(finished, tmp_path / str(number))
        path = list(files_of(run_dir))[number]
        if path == run_dir.config and damage is a_digit_changed:
            continue  # it is a person's to change, and another configuration then
        damage(path)
        try:
            assert resumed(finished, run_dir) == right, f"{path} is {damage.__name__}: other weights, without a word"
        except ConfigError as error:
            message = str(error)
            assert run_dir.checkpoints not in path.parents, f"there is an older checkpoint, and an archive: {message}"
            assert path.name in message or str(path.parent) in message, f"{path} is {damage.__name__}: {message}"
            assert len(message) > 40 and (";" in message or "," in message), message
        shutil.rmtree(run_dir.path)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_where_the_checkpoint_and_the_archive_are_both_damaged_the_file_of_the_archive_is_named(
    finished: ARun, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    run_dir = copy_of(finished, tmp_path)
    step = load_tally(run_dir.tally).durable_step
    truncated(run_dir.checkpoints / f"step_{step:06d}" / "manifest.json")
    (path,) = run_dir.trajectories.glob(f"step_{step:06d}.*")
    damage(path)
    with pytest.raises(ConfigError, match=f"checkpoint of step {step} is lost, .*step.*{step}.*restore the checkpoint"):
        resumed(finished, run_dir)


def test_what_is_not_a_checkpoint_is_logged_and_ignored(
    finished: ARun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = copy_of(finished, tmp_path).checkpoints
    newest = finished_checkpoints(checkpoints)[-1]
    shutil.copytree(newest, newest.with_name(f"{newest.name}.bak"))
    newest.with_name("step_000099").symlink_to(newest)
    newest.with_name("notes.txt").write_text("keep the one of last night")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(checkpoints) == newest
    for name in (f"{newest.name}.bak", "step_000099", "notes.txt"):
        assert f"{checkpoints / name} is not a checkpoint" in caplog.text


def test_a_run_without_any_whole_checkpoint_is_refused(finished: ARun, tmp_path: Path) -> None:
    run_dir = copy_of(finished, tmp_path)
    for path in finished_checkpoints(run_dir.checkpoints):
        empty(path / "manifest.json")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* intact: .*manifest.json is damaged.*--replay-archive"):
        resumed(finished, run_dir)
    shutil.rmtree(run_dir.checkpoints)
    with pytest.raises(ConfigError, match=r"contains no checkpoint, but \d+ steps count as trained"):
        resumed(finished, run_dir)
