"""The GPU's way to commit, with vLLM on a CPU: a shadow is kept, and its contents are exchanged with the model's."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from slipstream.actors.engine import vllm_engine
from slipstream.actors.engine.engine import EngineSpoiled
from slipstream.actors.engine.vllm_engine import VllmEngine
from slipstream.actors.weights.refused import WeightsUnfit
from slipstream.tools.run.tiny_model import TinyShape
from tests.actors.exchanging_engine import MODULE, SETTINGS, Settings
from tests.actors.generations import check_crossing, check_serves, committed, crossings_of
from tests.actors.vllm_engines import Offers, Policies, make_policies, run, started

ROOM = 1 << 30


@contextmanager
def exchanging(policies: Policies, settings: Settings, *, tensor_parallel: int = 1) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "ENGINE_MODULE", MODULE)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where its workers find MODULE, in spite of -P
        patch.setenv(SETTINGS, msgspec.json.encode(settings).decode())
        engine = started(policies.folder, kv_policy="recompute", tensor_parallel=tensor_parallel)
    yield engine
    asyncio.run(engine.close())


def check_takes(engine: VllmEngine, server: Offers, policies: Policies, number: int, *, version: int) -> None:
    committed(engine, server.offer(policies.models[number], policy_version=version))
    check_serves(engine, policies.models[number], version=version)


def check_refuses_version_2(engine: VllmEngine, server: Offers, policies: Policies) -> None:
    """The engine, which serves version 1, serves it again."""
    with pytest.raises(WeightsUnfit, match="version 2 is refused by its probe"):
        committed(engine, server.offer(policies.models[2], policy_version=2, probed=policies.models[0]))
    assert engine.policy_version == 1
    check_serves(engine, policies.models[1], version=1)


def test_a_kept_shadow_is_exchanged_and_exchanged_back(policies: Policies, server: Offers, tmp_path: Path) -> None:
    settings = Settings(log=str(tmp_path / "log"), room_bytes=ROOM)
    with exchanging(policies, settings) as engine:
        crossings, _ = run(crossings_of(engine, server.offer(policies.models[1], policy_version=1)))
        for crossing in crossings:
            check_crossing(crossing, policies.models[0], policies.models[1])
        check_refuses_version_2(engine, server, policies)
        check_takes(engine, server, policies, 2, version=3)
        check_takes(engine, server, policies, 0, version=4)
    log = Path(settings.log).read_text().splitlines()
    assert [line for line in log if "shadow" in line] == [
        "new weights are loaded beside those that serve: a shadow model of 0.0 GiB; 1024.0 of 1024.0 GiB were free"
    ]
    assert [line for line in log if "version" in line] == [f"version {each}: addresses kept" for each in (1, 2, 3, 4)]


@pytest.mark.long
def test_every_worker_of_an_engine_exchanges_its_part_and_exchanges_it_back(server: Offers, tmp_path: Path) -> None:
    policies = make_policies(tmp_path / "tiny", TinyShape(num_heads=4, num_kv_heads=2))
    settings = Settings(log=str(tmp_path / "log"), room_bytes=ROOM)
    with exchanging(policies, settings, tensor_parallel=2) as engine:
        check_takes(engine, server, policies, 1, version=1)
        check_refuses_version_2(engine, server, policies)
    log = Path(settings.log).read_text()
    assert log.count("a shadow model of") == 2 and log.count("addresses kept") == 4 and "changed" not in log


@pytest.mark.long
def test_without_room_a_shadow_comes_with_version_2(policies: Policies, server: Offers, tmp_path: Path) -> None:
    """The shadow model of a model that was itself reloaded before takes weights too."""
    settings = Settings(log=str(tmp_path / "log"), room_bytes=0)
    with exchanging(policies, settings) as engine:
        check_takes(engine, server, policies, 1, version=1)
        assert "a shadow model of" not in Path(settings.log).read_text()
        check_refuses_version_2(engine, server, policies)
        check_takes(engine, server, policies, 2, version=3)
    log = Path(settings.log).read_text()
    assert "the first version is loaded while nothing is generated" in log and "a shadow model of" in log
    assert "changed" not in log


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packs": True}, "vLLM keeps weights of this model in .*cpu_linear, outside of its tensors"),
        pytest.param(
            {"free_bytes": 1 << 30},
            "a shadow model needs 2.0 GiB, and 1.0 GiB of 1024.0 GiB are free; for one, lower",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_model_that_cannot_have_a_shadow_is_loaded_in_the_pause_with_the_reason_in_the_log(
    changes: dict[str, int], reason: str, policies: Policies, server: Offers, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(Settings(log=str(tmp_path / "log"), room_bytes=ROOM), **changes)
    with exchanging(policies, settings) as engine:
        for version in (1, 2):
            check_takes(engine, server, policies, version, version=version)
        with pytest.raises(EngineSpoiled, match="version 3 is refused by its probe"):
            committed(engine, server.offer(policies.models[0], policy_version=3, probed=policies.models[2]))
    (line,) = [line for line in Path(settings.log).read_text().splitlines() if "while nothing is generated" in line]
    assert re.search(reason, line)
