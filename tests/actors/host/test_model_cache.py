"""The model's files on a host that has none: they are pulled by hash, checked, kept, and pulled by one process."""

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.actors.host.model_cache import ModelUnavailable, cached_folder, learners_folder
from slipstream.actors.weights.fetch import PullCounts
from slipstream.actors.weights.pull import Puller
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import WireError, decode, encode
from slipstream.common.transfer.chunk_server import ChunkServer, ServerLimits
from slipstream.common.transfer.chunks import ChunkRequest
from slipstream.common.transfer.model_folder import (
    SHAPES,
    OfferedFolder,
    has_weights,
    model_files,
    tensor_shapes,
)
from slipstream.common.transfer.weights import Offer
from slipstream.replay.fleet.fleet import RunFacts
from tests.actors.chunks import Pulling, fetch_model
from tests.learner.publisher.offers import empty_offer
from tests.replay.buffer.every_verb import FACTS
from tests.tools.run.tiny_model import save_tiny_model

CHUNK_BYTES = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and around it what lies in folders but is no file of a model."""
    folder = save_tiny_model(tmp_path / "learner" / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "empty.txt").touch()
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".hidden.json").write_text("{}")
    (folder / "deeper").mkdir()
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "models"


class Served:
    def __init__(self, folder: Path, *, with_weights: bool = False, bytes_per_s: float = math.inf) -> None:
        self.files = model_files(folder, with_weights=with_weights)
        self.is_away = False
        self.counts: list[PullCounts] = []
        self._read = OfferedFolder(folder, self.files).read
        self._bytes_per_s = bytes_per_s
        self.server = ChunkServer("127.0.0.1", self._answer, limits=ServerLimits(chunk_bytes=CHUNK_BYTES), key=None)

    def _answer(self, request: ChunkRequest) -> bytes | None:
        time.sleep(request.num_bytes / self._bytes_per_s)
        return None if self.is_away else self._read(request)

    def newest(self) -> Offer:
        return empty_offer(1, pull_endpoint=self.server.endpoint)

    def puller(self) -> Puller:
        puller = Pulling(chunk_bytes=CHUNK_BYTES).puller
        self.counts.append(puller.counts)
        return puller

    def fetch(self, timeout_s: float = 60.0) -> Path:
        return cached_folder(self.files, make_puller=self.puller, newest=self.newest, timeout_s=timeout_s)

    @property
    def fetched_bytes(self) -> int:
        return sum(counts.fetched_bytes for counts in self.counts)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Served]]:
    """Serves files of `folder` to the end of the test."""
    with ExitStack() as stack:

        def served(**settings: Any) -> Served:
            made = Served(folder, **settings)
            stack.callback(made.server.close)
            return made

        yield served


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_host_without_the_folder_gets_data_alone_and_the_weights_only_for_adapters(
    folder: Path, cache: Path, serve: Callable[..., Served], with_weights: bool
) -> None:
    got = serve(with_weights=with_weights).fetch()
    names = {path.name for path in got.iterdir()}
    assert got.parent == cache and got != folder
    always = {"config.json", "generation_config.json", "tokenizer.json", "empty.txt"}
    assert names == always | ({"model.safetensors"} if with_weights else {SHAPES})
    assert all((got / name).read_bytes() == (folder / name).read_bytes() for name in names - {SHAPES})
    assert has_weights(got) is with_weights and tensor_shapes(got) == tensor_shapes(folder)


def test_what_is_cached_is_not_pulled_again_but_damaged_or_missing(folder: Path, serve: Callable[..., Served]) -> None:
    served = serve(with_weights=True)
    got = served.fetch()
    total = sum(file.blob.num_bytes for file in served.files)
    assert served.fetched_bytes == total
    assert served.fetch() == got and served.fetched_bytes == total
    (got / "tokenizer.json").write_text("[]")  # as long as before
    (got / "config.json").unlink()
    (got / "config.json.tmp").write_text("half")
    assert served.fetch() == got
    assert served.fetched_bytes == total + (folder / "config.json").stat().st_size + len("{}")
    assert (got / "tokenizer.json").read_text() == "{}"


def test_other_files_are_another_folder(folder: Path, serve: Callable[..., Served]) -> None:
    first = serve().fetch()
    (folder / "tokenizer.json").write_text('{"another": 1}')
    assert first != serve().fetch() and (first / "tokenizer.json").read_text() == "{}"


def test_the_learners_folder_is_used_where_a_host_has_it_with_the_same_files(folder: Path) -> None:
    facts, whole = (
        msgspec.structs.replace(FACTS, model_path=str(folder), model_files=model_files(folder, with_weights=each))
        for each in (False, True)
    )
    assert learners_folder(facts) == learners_folder(whole) == folder
    with (folder / "model.safetensors").open("r+b") as weights:  # another base at the same path
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x7f")
    assert learners_folder(whole) is None
    (folder / "tokenizer.json").write_text("[]")
    assert learners_folder(facts) is None
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").unlink()  # only the small files were copied
    assert learners_folder(facts) is None
    assert learners_folder(msgspec.structs.replace(facts, model_path="/no/such/folder")) is None


def test_a_file_that_changed_after_the_learners_start_is_not_taken(folder: Path, serve: Callable[..., Served]) -> None:
    served = serve()
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelUnavailable, match=r"no file of the model has arrived for 1 s: .*does not match its hash"):
        served.fetch(timeout_s=1.0)


def test_without_an_offer_or_its_source_the_wait_ends_with_the_reason(serve: Callable[..., Served]) -> None:
    served = serve()
    with pytest.raises(ModelUnavailable, match="the learner has offered no weights yet"):
        cached_folder(served.files, make_puller=served.puller, newest=lambda: None, timeout_s=0.3)
    served.is_away = True
    with pytest.raises(ModelUnavailable, match="no file of the model has arrived for 1 s"):
        served.fetch(timeout_s=1.0)
    served.is_away = False
    assert (served.fetch() / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to a folder with room for"):
        serve().fetch()


def test_of_the_actors_that_start_together_one_pulls(serve: Callable[..., Served]) -> None:
    served = serve(with_weights=True, bytes_per_s=64 * CHUNK_BYTES)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    endpoint = served.server.endpoint
    actors = [
        context.Process(target=fetch_model, args=(served.files, endpoint, CHUNK_BYTES, results)) for _ in range(3)
    ]
    for actor in actors:
        actor.start()
    fetched = sorted(results.get(timeout=120) for _ in actors)
    for actor in actors:
        actor.join(60)
    assert fetched == [0, 0, sum(file.blob.num_bytes for file in served.files)]


@pytest.mark.parametrize(
    "name",
    ["../config.json", "a/config.json", "/etc/x.json", ".bashrc.json", "model.py", "x.bin", "x.json\n", "", "x" * 300],
)
def test_a_name_that_is_no_plain_file_of_data_is_refused_with_the_facts(folder: Path, name: str) -> None:
    good = model_files(folder, with_weights=False)[0]
    facts = msgspec.structs.replace(FACTS, model_files=[good])
    assert decode(RunFacts, encode(facts)) == facts
    bad = msgspec.structs.replace(facts, model_files=[msgspec.structs.replace(good, name=name)])
    with pytest.raises(WireError, match="not a RunFacts"):
        decode(RunFacts, encode(bad))
