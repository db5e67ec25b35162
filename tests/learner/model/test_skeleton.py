"""Loading at size: rank 0 reads the folder, and the others never hold more than their shards and one tensor."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.learner.model.export import save_hf
from slipstream.learner.model.packed_model import PackedModel, load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.hosts import check_alike, check_hosts, check_shared, facts_of
from slipstream.learner.ranks.ranks import Ranks
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.several_ranks import SeveralRanks
from tests.tools.run.tiny_model import FLOAT32, save_scaling_model, save_tiny_model

TWO_HOSTS = ["learner.ranks=2", "learner.hosts=2", "learner.rendezvous=127.0.0.1:29500"]
# 13.7 M weights in float32, of which the largest tensor has 0.5 M.
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 32}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind."""
    path = tmp_path_factory.mktemp("skeleton")
    save_tiny_model(path / "wide", **WIDE)
    save_tiny_model(path / "small")
    save_scaling_model(path / "scaled")
    merging_tokenizer(CHATML).save_pretrained(path / "wide")
    SeveralRanks(be_one_of_two, path, num_ranks=2).wait()
    return path


def be_one_of_two(ranks: Ranks, folder: str) -> None:
    rank, path = ranks.rank, Path(folder)
    load(path / "small", ranks)  # what is imported once is not counted
    before = peak_bytes(forget=True)
    model = load(path / "wide", ranks)
    loading = peak_bytes() - before
    weights = dict(full_tensors(model))
    if rank == 0:
        save_file(weights, path / "gathered.safetensors")
    buffers = {name: buffer.clone() for name, buffer in model.causal_lm.named_buffers()}
    save_file(buffers, path / f"buffers_{rank}.safetensors")
    del weights
    before = peak_bytes(forget=True)
    save_hf(model, path / "exported", ranks=ranks, max_file_bytes=4 << 20)
    exporting = peak_bytes() - before
    with pytest.raises(ValueError, match="Gemma2ForCausalLM gives other log-probabilities"):  # rank 0 alone has seen it
        load(path / "scaled", ranks)
    (path / "weightless").mkdir(exist_ok=True)
    (path / "weightless" / "config.json").write_bytes((path / "small" / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="weightless cannot be trained here: OSError"):  # which rank 0 alone reads
        load(path / "weightless", ranks)
    with pytest.raises(ConfigError, match=r"absent has no config\.json"):  # on a host that lacks the folder
        load(path / ("small" if rank == 0 else "absent"), ranks)
    check_shared(path, ranks=ranks)
    with pytest.raises(ConfigError, match=r"rank 1 does not see the folder .* of rank 0, but one of its own"):
        check_shared(path / ("small" if rank == 0 else "wide"), ranks=ranks)  # as if each host had a disk of its own
    dist.barrier()  # rank 0 removes its mark last
    assert not list(path.rglob("seen_by_all_ranks_*"))
    hosts_that_were_not_started_alike_are_refused(path, ranks)
    (path / f"rank_{rank}.json").write_text(json.dumps({"loading": loading, "exporting": exporting}))


def hosts_that_were_not_started_alike_are_refused(path: Path, ranks: Ranks) -> None:
    """Rank 1 is on another host, and each time one thing differs there."""
    alike = load_config(None, [f"run.root={path}", "run.name=hosts", f"model.path={path / 'small'}", *TWO_HOSTS])
    RunDir(path, "hosts").create()
    check_hosts(alike, RunDir(path, "hosts"), ranks=ranks)
    check_alike({"data": "a"}, ranks=ranks)
    facts = facts_of(alike, path / "small")
    others = {
        "the settings": facts_of(load_config(None, ["run.seed=1"]), path / "small"),
        "config.json of `model.path`": facts_of(alike, path / "wide"),
        **{name: facts | {name: "another"} for name in ("Slipstream's code", "the version of torch")},
        "the file of objective.surrogate": facts | {"the file of objective.surrogate": "one"},
    }
    for name, other in others.items():
        with pytest.raises(ConfigError, match=f"rank 1 differs from rank 0 in {re.escape(name)} .*make its host like"):
            check_alike(other if ranks.rank else facts, ranks=ranks)
    alike.learner.ranks = 3
    with pytest.raises(ConfigError, match=r"`learner\.ranks` is 3, but 2 ranks have been started"):
        check_hosts(alike, RunDir(path, "hosts"), ranks=ranks)


def load(folder: Path, ranks: Ranks) -> PackedModel:
    return load_model(folder, ranks=ranks, settings=FLOAT32)


def peak_bytes(*, forget: bool = False) -> int:
    """The most memory that this process has held; `forget` makes that what it holds now."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def test_two_ranks_hold_together_and_export_what_the_folder_holds(found: Path) -> None:
    gathered, saved = load_file(found / "gathered.safetensors"), load_file(found / "wide" / "model.safetensors")
    exported = dict(AutoModelForCausalLM.from_pretrained(found / "exported").named_parameters())
    assert gathered.keys() == saved.keys()
    assert all(torch.equal(gathered[name], saved[name]) for name in saved)
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


def test_every_rank_has_the_buffers_that_transformers_computes(found: Path) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(found / "wide").named_buffers())
    assert "model.rotary_emb.inv_freq" in expected
    for rank in (0, 1):
        buffers = load_file(found / f"buffers_{rank}.safetensors")
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffers[name], expected[name]) for name in expected)


def test_only_the_first_rank_ever_holds_the_whole_model(found: Path) -> None:
    whole = sum(tensor.nbytes for tensor in load_file(found / "wide" / "model.safetensors").values())
    first, second = (json.loads((found / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert whole < first["loading"] < 1.75 * whole
    assert second["loading"] < 0.75 * whole  # half of it is its shards
    assert first["exporting"] < 0.5 * whole
    assert second["exporting"] < 0.5 * whole
