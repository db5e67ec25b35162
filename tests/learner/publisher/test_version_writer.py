"""Several ranks write one version together: its bytes are those of the gathered tensors, and too little is noticed.

Two and three ranks are started once each, and leave what they found.
"""

import dataclasses
import json
import mmap
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slipstream.actors.weights.receive import Receiver
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.connection import connect
from slipstream.common.transfer.host_memory import AnonymousMemory, map_memory
from slipstream.common.transfer.probe import Probe
from slipstream.common.transfer.weights import buffer_bytes
from slipstream.learner.model.folder_tensors import folder_name, stored_buffers
from slipstream.learner.model.kernel import DTYPES
from slipstream.learner.model.lora import adapters_of
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.probe_score import probe_of
from slipstream.learner.model.weight_shards import full_tensors, named_shards, whole
from slipstream.learner.publisher.publish import Publisher
from slipstream.learner.publisher.published import Published
from slipstream.learner.publisher.slots import NotTheLayout, Slots
from slipstream.learner.publisher.version_writer import VersionWriter
from slipstream.learner.ranks.ranks import Ranks, share
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.records import keys
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.server.redis_server import Server
from tests.learner.model.test_model_families import EXACT, SEEING, save
from tests.learner.publisher.offers import publisher_settings
from tests.learner.publisher.test_weights import flat_bytes, latest_version, receiver_info
from tests.several_ranks import SeveralRanks
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model
from tests.waiting import wait_until

# Of tensors with fewer rows than ranks: a gate of 1 row beside converted experts, adapters of rank 3.
FAMILIES = {"experts": EXACT["qwen2_moe"], "buffers": EXACT["glm4_moe"], "renamed": SEEING["qwen2_5_vl"]}
FAMILIES["transposed adapters"] = EXACT["gpt2"]
KINDS = ["tied", "untied", "adapters", *FAMILIES]
DTYPE_NAMES = ["float32", "bfloat16"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: Server) -> Path:
    """What each rank found, in a folder for each number of ranks."""
    path, num_ranks = tmp_path_factory.mktemp("results"), request.param
    for kind in KINDS:
        if kind in FAMILIES:
            save(FAMILIES[kind], path / kind)
        else:
            save_tiny_model(path / kind, tie=kind == "tied")
    SeveralRanks(be_one, path, redis_server.secret_url, num_ranks=num_ranks).wait()
    return path


def be_one(ranks: Ranks, folder: str, redis_url: str) -> None:
    path = Path(folder)
    found: dict[str, object] = {}
    for kind in KINDS:
        lora = LoraConfig(rank=3 if "adapters" in kind else 0)
        model = load_model(path / kind, ranks=ranks, settings=dataclasses.replace(FLOAT32, lora=lora))
        with torch.no_grad():
            for adapter in adapters_of(model.causal_lm).values():
                adapter.up.to_local().normal_()
        for dtype in DTYPE_NAMES:
            found[f"{kind} {dtype}"] = copied(model, dtype, ranks)
        if kind == "experts":
            found["several hosts"] = copied(model, "bfloat16", ranks, hosts=ranks.num_ranks)
        if kind == "tied":
            found |= published(model, ranks, path, redis_url)
    (path / f"{ranks.rank}.json").write_text(json.dumps(found))


def copied(model: PackedModel, dtype: str, ranks: Ranks, *, hosts: int = 1) -> dict[str, object]:
    """Whether memory that every rank writes its part of has the bytes of the whole tensors."""
    version = Published(model, dtype=dtype, hosts=hosts)
    memory = AnonymousMemory("slot", buffer_bytes(version.layout)) if ranks.rank == 0 else None
    slot = map_memory(share(memory.path if memory else None, str, ranks=ranks), access=mmap.ACCESS_WRITE)
    num_bytes = Slots([slot], version.layout, own=version.own).write(0, version.tensors())
    expected = flat_bytes(list(gathered(model, dtype).items()))
    adapters, merged = adapters_of(model.causal_lm), dict(full_tensors(model))
    bases = {folder_name(name): whole(shard) for name, shard in named_shards(model) if ".base_layer.weight" in name}
    torch.distributed.barrier()
    shards = [shard for _, shard in named_shards(model)]
    return {
        "equal": bytes(slot) == expected,
        "merged": all(
            torch.allclose(merged[name], base + adapter.scaling * whole(adapter.up) @ whole(adapter.down), atol=1e-4)
            for (name, base), adapter in zip(bases.items(), adapters.values(), strict=True)
        ),
        "num_bytes": num_bytes,
        "layout_bytes": sum(entry.num_bytes for entry in version.layout),
        "num_empty": sum(shard.to_local().numel() == 0 for shard in shards),
        "as_torch_says": own_rows_are_torchs(version, model),
    }


def own_rows_are_torchs(version: Published, model: PackedModel) -> bool:
    """Whether the rows that this rank writes of its shards are those that torch has put there."""
    for name, shard in named_shards(model):
        rows = version.own.get(name)
        if rows is not None:
            shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
            if (rows.start, rows.stop - rows.start) != (offset[0], shape[0]):
                return False
    return True


def gathered(model: PackedModel, dtype: str) -> dict[str, Tensor]:
    """What the folder's tensors are, gathered whole; in the order of the layout."""
    if adapters := adapters_of(model.causal_lm):
        whole_ones = {}
        for name, adapter in adapters.items():
            whole_ones |= {f"{name}.lora_A": whole(adapter.down), f"{name}.lora_B": whole(adapter.up)}
        return whole_ones
    buffers = {name for name, _ in stored_buffers(model.causal_lm)}
    return {name: tensor if name in buffers else tensor.to(DTYPES[dtype]) for name, tensor in full_tensors(model)}


def published(model: PackedModel, ranks: Ranks, path: Path, redis_url: str) -> dict[str, object]:
    """What an actor pulls of two versions, and what becomes of versions that are not written whole, or fenced out."""
    client, found = connect(redis_url), dict[str, object]()
    bulletin, receiver, publisher = Bulletin(client, path.name), None, None
    client.set(keys.epoch_key(path.name), 1)
    probe, version = probe_of(model, ranks.device), Published(model, dtype="bfloat16")
    if ranks.rank == 0:
        receiver = Receiver(receiver_info(redis_url, path.name, "a", "pull"))
        settings = publisher_settings(redis_url, path.name, version.layout, learner_epoch=1)
        publisher = Publisher(settings, log_path=path / "publisher.log", own=version.own)
    with closing(VersionWriter(version, ranks=ranks, publisher=publisher)) as writer:
        for number in (1, 2):
            with torch.no_grad():
                for _, shard in named_shards(model):
                    shard.to_local().mul_(1.25)
            writer.publish(policy_version=number, probe=probe)
            expected = flat_bytes(list(gathered(model, "bfloat16").items()))
            if receiver:
                wait_until(lambda newest=number: latest_version(bulletin) == newest, f"version {number}")
                offer = bulletin.latest()
                found[f"pulled {number}"] = bytes(receiver.receive(offer).numpy()) == expected
        found["too little"] = too_little(writer, version, ranks, probe)
        writer.publish(policy_version=5, probe=probe)
        if receiver:
            wait_until(lambda: latest_version(bulletin) == 5, "a version after those that failed")
            receiver.close()
            client.set(keys.epoch_key(path.name), 2)
        torch.distributed.barrier()
        with pytest.raises(FencedOut) as fenced_out:  # once the publisher process has found out
            for number in range(6, 1000):
                writer.publish(policy_version=number, probe=probe)
        found["fenced out"] = str(fenced_out.value)
    if publisher:
        publisher.close()
    found["mapped"] = "slipstream-weights" in Path("/proc/self/maps").read_text()
    return found


def too_little(writer: VersionWriter, version: Published, ranks: Ranks, probe: Probe) -> list[str]:
    """What each rank raises if rank 1 lacks a tensor, and if it writes nothing and does not know it."""
    reasons, make, slots = [], version.tensors, writer._slots
    if ranks.rank == 1:
        version.tensors = lambda: (part for part in make() if part[0] != "model.norm.weight")  # type: ignore[method-assign]
    for number in (3, 4):
        with pytest.raises(NotTheLayout, match=f"version {number} is not published") as raised:
            writer.publish(policy_version=number, probe=probe)
        reasons.append(str(raised.value))
        version.tensors = make  # type: ignore[method-assign]
        if ranks.rank == 1:
            writer._slots = None
    writer._slots = slots
    return reasons


def found_by(results: Path) -> list[dict[str, dict[str, object]]]:
    files = sorted(results.glob("[0-9].json"))
    assert len(files) in (2, 3)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_write_the_bytes_of_the_gathered_tensors(results: Path, kind: str, dtype: str) -> None:
    found = [each[f"{kind} {dtype}"] for each in found_by(results)]
    assert all(each["equal"] and each["merged"] and each["as_torch_says"] for each in found)
    if kind != "transposed adapters":  # which are gathered, so rank 0 writes them
        assert all(each["num_bytes"] for each in found), "a rank wrote nothing"
    assert sum(each["num_bytes"] for each in found) == found[0]["layout_bytes"]  # type: ignore[misc]
    if kind == "experts":
        assert found[1]["num_empty"], "no shard was empty"


def test_with_every_rank_on_a_host_of_its_own_rank_0_writes_all(results: Path) -> None:
    first, *others = [each["several hosts"] for each in found_by(results)]
    assert first["equal"] and first["num_bytes"] == first["layout_bytes"]
    assert {each["num_bytes"] for each in others} == {0}


def test_an_actor_pulls_what_the_ranks_wrote(results: Path) -> None:
    first, *_ = found_by(results)
    assert first["pulled 1"] and first["pulled 2"]


def test_a_version_of_which_a_rank_has_written_too_little_is_published_by_none(results: Path) -> None:
    reasons = [each["too little"] for each in found_by(results)]
    for rank, (lacking, nothing) in enumerate(reasons):
        own = "missing: ['model.norm.weight']" if rank == 1 else "another rank could not write its part"
        assert own in lacking
        assert "another rank could not write its part" in nothing
    assert len({nothing for _, nothing in reasons}) == 1


def test_every_rank_hears_that_another_learner_has_taken_over(results: Path) -> None:
    assert {"epoch 2 has taken over from epoch 1" in str(each["fenced out"]) for each in found_by(results)} == {True}


def test_no_rank_maps_the_slots_after_it_has_closed(results: Path) -> None:
    assert {each["mapped"] for each in found_by(results)} == {False}
