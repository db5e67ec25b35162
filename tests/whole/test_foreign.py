"""Scripts of docs/examples/foreign train: one run with all of them, by a learner and an actor without vLLM.

The actor's engine writes a right reply or a wrong one: see `foreign_replies` of tests/actors/scripted_actor.py.
"""

import json
import shutil
from typing import Any

import pytest

from slipstream.replay.server.redis_server import Server
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.processes import PLAYED_BY_OTHERS, REPOSITORY, Run, customized
from tests.tools.run.tiny_model import save_tiny_model

SCRIPTS = "docs.examples.foreign"
VERIFIERS = REPOSITORY / "build/adapters-verifiers/bin/python"  # of an environment that `make ci-long` makes
CORRIDOR = f"{SCRIPTS}.gymnasium_corridor"
SUMS = {"taskset": {"id": "verifiers_sums"}, "agent": {"harness": {"id": "direct"}}}
KINDS: dict[str, dict[str, Any]] = {  # what foreign.yaml and verifiers_sums.yaml start, as parts of one run
    "gymnasium": {"options": {"game": f"{CORRIDOR}:Corridor-v0", "speech": f"{CORRIDOR}:SPEECH"}},
    "openai_agents": {"name": "agent", "options": {"agent": f"{SCRIPTS}.openai_agents_shop:play"}},
    "smolagents": {"name": "agent", "options": {"agent": f"{SCRIPTS}.smolagents_shop:play"}},
    "trl": {  # what `slipstream.train` makes of the script's call
        "name": "dataset",
        "options": {"train": "", "check": "none"},
        "rewards": {
            "right": {"part": f"{SCRIPTS}.trl_sums:right", "success_from": 1.0},
            "short": {"part": f"{SCRIPTS}.trl_sums:short"},
        },
    },
    "verifiers": {"options": {"python": str(VERIFIERS), "config": SUMS}},
}
SETTINGS = ["model.max_tokens=8192", "learner.micro_batch_tokens=8192", "sampling.max_turn_tokens=96"]
SETTINGS += ["env.max_turns=8", "learner.steps=1", "replay.target_lag=0"]
SETTINGS += ["replay.max_lag=0", *PLAYED_BY_OTHERS, "run.seed=51"]  # with this seed each kind has a group


Record = tuple[list[str], dict[str, float]]
WITH_VERIFIERS = pytest.param(  # whose import takes as long as all the rest
    [*KINDS],
    marks=[
        pytest.mark.long,
        pytest.mark.skipif(not VERIFIERS.exists(), reason="make build/adapters-verifiers/.installed"),
    ],
)


@pytest.fixture(scope="module", params=[[name for name in KINDS if name != "verifiers"], WITH_VERIFIERS])
def record(redis_server: Server, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Record:
    """The kinds of a run, and the record of its only step, which takes a group of each."""
    kinds = request.param
    folder = tmp_path_factory.mktemp("foreign")
    tokenizer = byte_tokenizer(CHATML)
    save_tiny_model(folder / "model", vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained(folder / "model")
    own = folder / "own"  # what the scripts import
    own.mkdir()
    shutil.copy(REPOSITORY / "docs/examples/foreign/verifiers_sums.py", own)
    shutil.copy(REPOSITORY / "tests/adapters/verifiers/direct.py", own)  # a harness that starts no program
    (own / "datasets.py").write_text("class Dataset: ...")  # for lines that only `python trl_sums.py` runs
    (own / "sitecustomize.py").touch()  # so that the processes can be forks
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(own)
        patch.setenv(*customized(own).popitem())
        from docs.examples.foreign.trl_sums import sums

        KINDS["trl"]["options"]["train"] = str(folder / "rows.jsonl")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(40)))
        (folder / "run.yaml").write_text(json.dumps({"env": {"mixture": {name: KINDS[name] for name in kinds}}}))
        files = [REPOSITORY / "docs/examples/foreign/foreign.yaml", folder / "run.yaml"]
        sizes = [f"model.path={folder / 'model'}", f"replay.groups_per_step={len(kinds)}"]
        settings = [*map(str, files), *sizes, *SETTINGS]
        with Run(f"test-foreign-{len(kinds)}", root=folder, server=redis_server, settings=settings) as run:
            learner = run.start_learner()
            run.start_scripted_actor("actor")
            run.wait_until(lambda: learner.exit_code == 0, "the learner has finished the run")
            assert run.steps() == [1] and run.audit() == [] and run.ledger().balanced
            return kinds, run.step_records()[0]


def test_foreign_scripts_train(record: Record) -> None:
    kinds, metrics = record
    for kind in kinds:
        assert metrics[f"trained/share_of_{kind}"] == 1 / len(kinds), kind
        assert metrics[f"trained/success_in_{kind}"] > 0, kind
