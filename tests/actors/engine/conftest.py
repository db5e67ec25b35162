"""The model and the publisher of the tests with vLLM."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from slipstream.tools.run.tiny_model import TinyShape
from tests.actors.vllm_engines import Offers, Policies, make_policies


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return make_policies(tmp_path_factory.mktemp("model") / "tiny", TinyShape())


@pytest.fixture(scope="module")
def server() -> Iterator[Offers]:
    with closing(Offers()) as server:
        yield server
