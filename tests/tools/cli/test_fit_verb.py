"""`slipstream fit sft`, `dpo` and `reward` as a user runs them."""

import json
from pathlib import Path

import pytest

from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import Standing, standing
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.tools.cli.verbs import Output, slipstream

WORDS = ("one", "two", "three", "four", "five", "six")


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and conversations in which the answer to a number is the number twice; wrong ones earn nothing."""
    root = tmp_path_factory.mktemp("verbs")
    tiny = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1)
    make_tiny_model(root / "model", texts=[" ".join(WORDS)], shape=tiny, max_tokens=32, seed=0)
    rows = [
        {"messages": talk(word, f"{answer} {answer}"), "return": float(answer == word), "group_id": number}
        for number, word in enumerate(WORDS)
        for answer in WORDS
    ]
    rows.append({"messages": talk("one " * 40, "one one"), "return": 1.0})
    rows.append({"messages": talk("one", "one one")[:1], "return": 1.0})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def settings(folder: Path, name: str, *more: str) -> list[str]:
    model = [f"model.path={folder}/model", "model.max_tokens=32", "sampling.max_turn_tokens=8", "optim.lr=0.01"]
    rows = [f"--data={folder}/rows.jsonl", "--held-out=0", "--batch-rows=3"]
    return [*model, *rows, f"run.root={folder}/runs", f"run.name={name}", *more]


@pytest.mark.long
def test_rejection_sampling_on_two_ranks_and_then_again_from_where_it_ended(folder: Path) -> None:
    arguments = settings(folder, "sft", "--min-return=1", "--epochs=20", "learner.ranks=2")
    done = slipstream("fit", "sft", *arguments)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "sft"
    trained = run / "trained_model"
    assert done.stdout.strip().splitlines()[-1] == str(trained)
    assert (trained / "model.safetensors").is_file() and (trained / "tokenizer.json").is_file()
    assert "30 rows are left out: return below --min-return" in done.stderr
    assert "1 rows are left out: longer than model.max_tokens, 32" in done.stderr
    assert "1 rows are left out: no message is the assistant's" in done.stderr
    assert "training on 6 examples, 0 are held out" in done.stderr
    losses = [record["fit/loss"] for record in read_metrics(run / "metrics.jsonl")]
    assert len(losses) == 40 and losses[-1] < 0.5 * losses[0]
    again = slipstream("fit", "sft", *arguments)
    assert again.returncode == 0 and "resumed from step_000040" in again.stderr
    before = {path: path.read_bytes() for path in (run / "config.yaml", run / "fit.json")}
    other = slipstream("fit", "sft", *arguments, "--epochs=3", "optim.lr=0.5")
    assert other.returncode == 2 and "was started with another --epochs; choose another `run.name`" in other.stderr
    assert all(path.read_bytes() == content for path, content in before.items())
    assert standing(RunDir(folder / "runs", "sft")) is Standing.FINISHED


@pytest.mark.parametrize("goal", ["dpo", pytest.param("reward", marks=pytest.mark.long)])
def test_a_preference_is_learnt_from_what_was_earned(folder: Path, goal: str) -> None:
    done = slipstream("fit", goal, *settings(folder, goal, "--epochs=15"))
    assert done.returncode == 0, done.stderr
    assert standing(RunDir(folder / "runs", goal)) is Standing.FINISHED
    assert "neither best nor worst of their group" in done.stderr
    records = list(read_metrics(folder / "runs" / goal / "metrics.jsonl"))
    assert records[0]["fit/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert records[-1]["fit/loss"] < 0.5 and records[-1]["fit/accuracy"] == 1


def test_what_is_missing_is_reported_at_once(folder: Path, refused: Output) -> None:
    (folder / "long.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines(keepends=True)[-2])
    for goal, setting, complaint in (
        ("sft", "model.path=''", "`model.path` is empty"),
        ("dpo", "--data=nowhere.jsonl", "`--data` must name a file of conversations, got 'nowhere.jsonl'"),
        ("reward", "--beta=0", "`--beta` must be > 0"),
        ("sft", f"--data={folder}/long.jsonl", "has no row to train on: 1 longer than model.max_tokens, 32"),
    ):
        assert complaint in refused("fit", goal, *settings(folder, "none", setting))
    assert not (folder / "runs" / "none").exists()


@pytest.mark.parametrize("goal", ["sft", "dpo", "reward", "prm"])
def test_a_run_of_another_kind_is_left_as_it_is(folder: Path, refused: Output, goal: str) -> None:
    row = {"messages": talk("one", "one"), "turn_labels": [1.0]}
    pair = {"chosen": talk("one", "one"), "rejected": talk("one", "two")}
    (folder / "few.jsonl").write_text(json.dumps(pair if goal in ("dpo", "reward") else row) + "\n")
    run = folder / "runs" / f"of-up-{goal}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: of-up}\n")
    said = refused("fit", goal, *settings(folder, run.name, f"--data={folder}/few.jsonl"))
    assert "is a run of another kind" in said and "choose another run.name" in said
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    assert (run / "config.yaml").read_text() == "run: {name: of-up}\n"
