"""Fetches a model's files in a process of its own, which imports no more than that needs."""

import multiprocessing

from slipstream.actors.host.model_cache import cached_folder
from slipstream.common.transfer.model_folder import ModelFile
from tests.actors.chunks import Pulling
from tests.learner.publisher.offers import empty_offer

CHUNK_BYTES = 4096


def fetch_model(files: list[ModelFile], endpoint: str, results: "multiprocessing.Queue[int]") -> None:
    puller, offer = Pulling(chunk_bytes=CHUNK_BYTES).puller, empty_offer(1, pull_endpoint=endpoint)
    cached_folder(files, make_puller=lambda: puller, newest=lambda: offer, timeout_s=60.0)
    results.put(puller.counts.fetched_bytes)
