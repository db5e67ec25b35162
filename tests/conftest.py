"""What every test may ask for: a real Redis server for the session, a client, and a run name of the test's own."""

import asyncio
import gc
import inspect
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import redis
from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401  the hook finds it by name

# Shapes and types of the learner's functions are checked at run time; it must come before the first import of them.
install_import_hook("slipstream.learner", "tests.typecheck.typechecked")

# The same examples in every run, so that a failure belongs to a change. `--hypothesis-profile default` draws others.
# None has a deadline: how long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("same")

from slipstream.common.process.connection import PASSWORD_VARIABLE, connect  # noqa: E402
from slipstream.common.process.shutdown import Shutdown  # noqa: E402
from slipstream.tools.lab.loopback_server import Server, start_server  # noqa: E402
from tests.preload import start_by_forks, start_workers_by_forks  # noqa: E402
from tests.replay.records.attempts import Views, make_buffer  # noqa: E402

if TYPE_CHECKING:
    import torch

    from slipstream.learner.ranks.ranks import Ranks
    from tests.learner.publisher.test_weights import Plane
    from tests.tools.replay.inspected import Inspected


start_by_forks()

# Files run in parallel. With the longest ones first, no worker is left alone with a long one at the end.
# Those that start vLLM are for two workers, each of which imports it once: see tests/preload.py.
VLLM = ["test_up", "test_loop", "test_rerun", "test_vllm_engine", "test_family_table", "test_leaving", "test_faults"]
VLLM += ["test_tensor_parallel", "test_bad_input", "test_vllm_recompute", "test_collect", "test_start_failures"]
VLLM += ["test_overlapped_engine", "test_loop_to_read", "test_export", "test_python_api", "test_logprob_parity"]
VLLM += ["test_vllm_exchange", "test_family_engine", "test_vllm_tool_calls"]
LONGEST = [*VLLM, "test_env_contract", "test_fsdp", "test_compiler", "test_elastic", "test_checkpoint_kill"]
LONGEST += ["test_fake_gpu", "test_asset_swebench", "test_relay", "test_objective_proof", "test_bare_host"]
LONGEST += ["test_replay_faults", "test_weight_faults", "test_env_faults", "test_road", "test_foreign", "test_ledger"]
LONGEST += ["test_accumulation", "test_damaged_run", "test_peak", "test_no_room", "test_weights", "test_server_command"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: only the tests that ask for a device, on a GPU"
    )


def pytest_report_header(config: pytest.Config) -> str:
    """The versions and the GPU that a report of `make gpu-check` is of."""
    if config.getoption("device") == "cpu":
        return "device: cpu"
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "PyTorch sees no GPU"
    return f"device: {gpu}, torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    # More threads than cores wait for each other in turns: a learner's step took seven times the CPU.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_workers_by_forks(config.invocation_params.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.split("::")[0]).stem
            return f"vLLM {VLLM.index(stem) % 2}" if stem in VLLM else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("device") == "cuda":
        items[:] = [item for item in items if isinstance(item, pytest.Function) and "device" in item.fixturenames]
        return
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, its fixtures outside of it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def pytest_collection_finish() -> None:
    """What all files have imported stays to the end: no later search for garbage looks through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests: leave its settings as they are, and keep to keys of your own `run_id`."""
    with start_server(tmp_path_factory.mktemp("redis")) as server:
        with connect(server.admin_url) as client:
            client.config_set("appendfsync", "no")  # else every write of every test waits for the disk
        yield server


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """The session's server, password included."""
    return redis_server.secret_url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def run_id() -> str:
    """A run name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def _nothing_of_a_verb_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A verb in this process leaves a run's password in its environment, and the working directory on its path."""
    password, path, folders = os.environ.get(PASSWORD_VARIABLE), list(sys.path), str(tmp_path_factory.getbasetemp())
    yield
    sys.path[:] = [place for place in sys.path if place in path or not place.startswith(folders)]
    os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        os.environ[PASSWORD_VARIABLE] = password


@pytest.fixture
def shutdown() -> Iterator[Shutdown]:
    """Its signal handlers are taken back, and threads that watch it end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    shutdown = Shutdown()
    yield shutdown
    shutdown.requested.set()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def buffer(redis_client: redis.Redis, run_id: str) -> Views:
    """A buffer whose leases outlast the test, with an epoch."""
    buffer = make_buffer(redis_client, run_id)
    buffer.learner.acquire_epoch()
    return buffer


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> "torch.device":
    """The CPU, or the GPU with `--device cuda`: `make gpu-check` runs the tests that ask for it there."""
    import torch  # here, so that only a test that asks for it imports torch

    return torch.empty(0, device=pytestconfig.getoption("device")).device


@pytest.fixture
def gpu(device: "torch.device") -> "torch.device":
    """The GPU; without one the test is skipped."""
    if device.type == "cpu":
        pytest.skip("it needs a GPU: make gpu-check")
    return device


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, for all tests: leave it as it is."""
    from tests.tools.run.tiny_model import save_tiny_model  # here, so that only a test that asks for it imports torch

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ranks(pytestconfig: pytest.Config) -> "Iterator[Ranks]":
    """This process as the only rank, on the device of the tests."""
    from slipstream.learner.ranks.ranks import join_ranks, leave_ranks
    from tests.learner.devices import on_cpu

    joined = join_ranks(timeout_s=60)
    yield on_cpu(joined) if pytestconfig.getoption("device") == "cpu" else joined
    leave_ranks()


@pytest.fixture
def plane(redis_url: str, redis_client: redis.Redis, run_id: str, tmp_path: Path) -> "Plane":
    from tests.learner.publisher.test_weights import Plane  # here, as above

    return Plane(redis_url, redis_client, run_id, tmp_path)


@pytest.fixture
def inspected(
    redis_client: redis.Redis, redis_url: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> "Inspected":
    """A run for `slipstream replay`."""
    # here, so that only a test that asks for it imports transformers
    from tests.tools.replay.inspected import Inspected

    return Inspected(redis_client, redis_url, run_id, tmp_path, capsys)
