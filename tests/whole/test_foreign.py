"""Scripts of docs/examples/foreign train as they are: a learner, and an actor that writes at random, without vLLM.

`make ci-long` has the others, whose packages are not ours.
"""

import json
from pathlib import Path

import pytest

from slipstream.replay.server.redis_server import Server
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.processes import REPOSITORY, Run, customized
from tests.tools.run.tiny_model import save_tiny_model

SCRIPTS = "docs.examples.foreign"
SETTINGS = {
    "gymnasium": [
        "env.name=gymnasium",
        "env.max_turns=8",
        f"env.options.game={SCRIPTS}.gymnasium_corridor:Corridor-v0",
        f"env.options.speech={SCRIPTS}.gymnasium_corridor:SPEECH",
    ],
    "trl": [  # what `slipstream.train` makes of the script's call
        "env.name=dataset",
        "env.options={train: ROWS, check: none}",
        f"env.rewards={{right: {{part: '{SCRIPTS}.trl_sums:right', success_from: 1.0}}}}",
        f"env.rewards.short.part={SCRIPTS}.trl_sums:short",
    ],
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_foreign_script_trains(
    kind: str, redis_server: Server, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(CHATML)
    save_tiny_model(tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(tmp_path / "model")
    small = [f"model.path={tmp_path / 'model'}", "objective.guard=false", "objective.max_negative_kl=0"]
    small.append("replay.group_size=16")  # one of 32 that walk at random finds the door
    settings = [str(REPOSITORY / "docs/examples/foreign/foreign.yaml"), *small]
    settings += [setting.replace("ROWS", str(tmp_path / "rows.jsonl")) for setting in SETTINGS[kind]]
    if kind == "trl":
        # The script has it to write its rows, in lines that only `python trl_sums.py` runs.
        (tmp_path / "datasets.py").write_text("class Dataset: ...")
        (tmp_path / "sitecustomize.py").touch()  # so that the processes can be forks
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(*customized(tmp_path).popitem())
        from docs.examples.foreign.trl_sums import sums

        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(40)))
    with Run(run_id, root=tmp_path, server=redis_server, settings=settings) as run:
        learner = run.start_learner()
        run.start_scripted_actor("actor")
        run.wait_until(lambda: learner.exit_code == 0, "the learner has finished the run")
        assert run.steps() == [1, 2] and sum(record["trained/reward"] for record in run.step_records()) > 0
        assert run.audit() == [] and run.ledger().balanced
