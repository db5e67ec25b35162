"""Fitting to recorded conversations: each gradient against a second way to it, whatever the batch was cut into."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.output import write_json
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.text.dialogue import Branch
from slipstream.learner.batch.examples import Example, Goal, example_of
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.fit import fit as fit_module
from slipstream.learner.fit.fit import fit
from slipstream.learner.fit.fit_identity import identity_of
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.learner.model.reward_model import RewardModel
from slipstream.learner.ranks.ranks import Ranks, context_of
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.several_ranks import SeveralRanks
from tests.tools.run.tiny_model import without_absent

WORDS = [f"w{number}" for number in range(48)]
GOALS: tuple[Goal, ...] = ("sft", "dpo", "reward", "prm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "model"
    tiny = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1)
    make_tiny_model(path, texts=[" ".join(WORDS)], shape=tiny, max_tokens=64, seed=0)
    return path


def branch(rng: np.random.Generator, length: int) -> Branch:
    """Random tokens, of which every other stretch of three is learnt from: a reply, whose number is where it ends."""
    return Branch(
        tokens=rng.integers(8, 48, length).tolist(),
        loss_mask=[place // 3 % 2 == 1 for place in range(length)],
        reply_stops={stop: stop for stop in range(6, length + 1, 6)},
    )


def examples(goal: Goal, number: int, *, seed: int = 0) -> list[Example]:
    """The lengths of sides differ; the last comes in two branches."""
    rng = np.random.default_rng(seed)
    made = []
    for place in range(number):
        sides = [[branch(rng, int(rng.integers(6, 30)))] for _ in range(2 if goal in ("dpo", "reward") else 1)]
        if place == number - 1:
            sides[0].append(branch(rng, 11))
        made.append(example_of(sides, goal, labels={stop: stop / 30 for stop in (6, 12, 24)}))  # the fourth has none
    return made


def config_for(folder: Path, *overrides: str) -> Config:
    usual = ["model.max_tokens=64", "learner.micro_batch_tokens=64", "optim.lr=0.01"]
    return load_config(None, [f"model.path={folder}", *usual, *overrides])


def loss_and_gradient(goal: Goal, config: Config, ranks: Ranks, made: list[Example]) -> tuple[float, dict[str, Tensor]]:
    """Of one step, and nothing updated; a reward model's head, which begins at 0, is given weights first."""
    fitted = fit_module._load(goal, config, FitOptions(), RunDir(Path("unused"), "run"), ranks=ranks, num_steps=3)
    if isinstance(fitted.model, RewardModel):
        with torch.no_grad():
            torch.manual_seed(1)
            fitted.model.score.weight.to_local().copy_(torch.randn(1, 32))
    material = fit_module._material(fitted, made)
    if goal == "dpo":  # as if the policy had moved already
        material = replace(material, reference=material.reference - np.linspace(-9, 9, len(made)))
    metrics, weights, divisor = fit_module._weights(fitted, material)
    output_sum = fit_module._backward(fitted, fit_module._with_weights(made, weights), divisor=divisor)
    loss = -output_sum / divisor if goal == "sft" else metrics.means()["fit/loss"]
    parameters = [*fitted.model.causal_lm.named_parameters(), *fitted.model.heads()]
    return loss, {name: each.grad.full_tensor() for name, each in parameters if each.grad is not None}


# --- A second way: transformers' own model, one sequence at a time, the loss as it is printed in the paper.


def plainly(goal: Goal, folder: Path, made: list[Example]) -> tuple[float, dict[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model = without_absent(model, folder)
    torch.manual_seed(1)
    head = torch.randn(1, 32).requires_grad_(True)

    def said(side: list[TokenSequence]) -> Tensor:
        total = torch.zeros(())
        for sequence in side:
            ids, places = torch.tensor(sequence.tokens).long()[None], np.flatnonzero(sequence.loss_mask)
            if goal in ("reward", "prm"):
                hidden = model.model(input_ids=ids).last_hidden_state[0]
                total = total + (hidden[places] @ head[0]).sum()
            else:
                logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
                total = total + logprobs[places - 1, ids[0, places]].sum()
        return total

    if goal == "prm":
        sequences = [sequence for sides in made for (sequence,) in sides]
        labelled = [(each, place) for each in sequences for place in np.flatnonzero(each.loss_mask).tolist()]
        scores = [said([replace(each, loss_mask=np.arange(each.num_tokens) == place)]) for each, place in labelled]
        labels = torch.tensor([(place + 1) / 30 for _, place in labelled])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.stack(scores), labels)
    elif goal == "sft":
        count = sum(int(sequence.loss_mask.sum()) for (side,) in made for sequence in side)
        loss = -torch.stack([said(side) for (side,) in made]).sum() / count
    else:
        differences = torch.stack([said(chosen) - said(rejected) for chosen, rejected in made])
        if goal == "dpo":
            moved = differences.detach() - torch.linspace(-9, 9, len(made))
            loss = -torch.nn.functional.logsigmoid(0.1 * (differences - moved)).mean()
        else:
            loss = -torch.nn.functional.logsigmoid(differences).mean()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss.detach()), found | ({"score.weight": head.grad} if head.grad is not None else {})


@pytest.mark.parametrize("goal", GOALS)
def test_loss_and_gradient_are_those_of_the_printed_loss(goal: Goal, folder: Path, ranks: Ranks) -> None:
    made = examples(goal, 5)
    loss, expected = plainly(goal, folder, made)
    for micro_batch_tokens in (64, 400):  # many micro-batches, the two sides of a pair apart; and one
        config = config_for(folder, f"learner.micro_batch_tokens={micro_batch_tokens}")
        found, gradients = loss_and_gradient(goal, config, ranks, made)
        assert found == pytest.approx(loss, rel=1e-5)
        assert set(gradients) == set(expected)
        for name, value in expected.items():
            atol = 1e-5 * float(value.abs().max() + 1e-6)
            assert torch.allclose(gradients[name], value, rtol=2e-4, atol=atol), name


def test_a_side_that_ends_in_what_both_say_weighs_as_much_as_the_other(folder: Path, ranks: Ranks) -> None:
    """At the reference every margin is 0: DPO's loss is ln 2, and the gradients of a pair of equal sides cancel."""
    (chosen, _), *_ = examples("dpo", 1)
    _, found = loss_and_gradient("dpo", config_for(folder), ranks, [(chosen, chosen)])
    assert all(float(value.abs().max()) < 1e-6 for value in found.values())


# --- Two ranks.


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> Path:
    SeveralRanks(be_one_of_two, folder, num_ranks=2).wait()
    return folder.parent


def be_one_of_two(ranks: Ranks, model: str) -> None:
    folder = Path(model)
    fit_module.check_export = lambda *_, **__: None  # of this process: it starts another, with all imports, each time
    for goal in GOALS:
        train(goal, folder, folder.parent / f"{goal}_on_two", ranks, epochs=1)
        together = replace(ranks, context=context_of(2, 2))
        train(goal, folder, folder.parent / f"{goal}_on_two_together", together, epochs=1)


def train(
    goal: Goal, folder: Path, run: Path, ranks: Ranks, *settings: str, epochs: int = 2, shutdown: Shutdown | None = None
) -> bool:
    config = config_for(folder, f"run.root={run.parent}", f"run.name={run.name}", *settings)
    run_dir, options, made = RunDir(run.parent, run.name), FitOptions(batch_rows=4, epochs=epochs), examples(goal, 9)
    run_dir.create()
    if not run_dir.fit.exists():
        write_json(run_dir.fit, identity_of(goal, made[:7], options, config=config))
    named = {"config": config, "options": options, "run_dir": run_dir, "ranks": ranks}
    return fit(goal, made[:7], made[7:], **named, shutdown=shutdown or Shutdown())


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "trained_model" / "model.safetensors")


@pytest.mark.parametrize("goal", GOALS)
def test_two_ranks_do_what_one_does(goal: Goal, folder: Path, on_two_ranks: Path, ranks: Ranks) -> None:
    alone = on_two_ranks / f"{goal}_on_one"
    assert train(goal, folder, alone, ranks, epochs=1)
    one, first = weights(alone), list(read_metrics(alone / "metrics.jsonl"))
    for run in (on_two_ranks / f"{goal}_on_two", on_two_ranks / f"{goal}_on_two_together"):
        two = weights(run)
        assert set(one) == set(two)
        assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4) for name in one)
        for here, there in zip(first, read_metrics(run / "metrics.jsonl"), strict=True):
            unlike = {"time"}
            if abs(there.get("fit/margin", 1.0)) < 1e-6:  # policy and reference are still equal: its sign is rounding
                unlike.add("fit/accuracy")
            for name in set(here) - unlike:
                assert here[name] == pytest.approx(there[name], rel=1e-3, abs=1e-4), name


# --- A run.


@pytest.mark.parametrize(
    "goal", ["sft", "dpo", *(pytest.param(each, marks=pytest.mark.long) for each in ("reward", "prm"))]
)
def test_a_run_learns_and_continues_bit_for_bit(goal: Goal, folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    assert train(goal, folder, tmp_path / "whole", ranks, "learner.checkpoint_every=3")
    records = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    losses = [record["fit/loss"] for record in records if "fit/loss" in record]
    assert len(losses) == 4  # two epochs of seven examples, four at a time
    assert losses[-1] < losses[0]
    held_out = [(record["step"], record["fit/held_out_loss"]) for record in records if "fit/held_out_loss" in record]
    assert [step for step, _ in held_out] == [0, 2, 4]
    if goal != "sft":
        assert losses[0] == pytest.approx(np.log(2), rel=1e-5) == pytest.approx(held_out[0][1], rel=1e-5)

    stopped = Shutdown()
    stopped.requested.set()
    while not train(goal, folder, tmp_path / "halting", ranks, shutdown=stopped):
        pass  # a step at a time, each from the checkpoint of the one before
    found, expected = weights(tmp_path / "halting"), weights(tmp_path / "whole")
    assert all(torch.equal(expected[name], value) for name, value in found.items())
    again = list(read_metrics(tmp_path / "halting" / "metrics.jsonl"))
    assert [record["step"] for record in again] == [record["step"] for record in records]


def test_no_run_of_something_else_is_continued(folder: Path, tmp_path: Path, ranks: Ranks, shutdown: Shutdown) -> None:
    shutdown.requested.set()
    assert not train("sft", folder, tmp_path / "run", ranks, shutdown=shutdown)  # after one step
    for goal, overrides, epochs, what in (
        ("dpo", [], 2, r"goal and --data; choose another `run\.name`"),
        ("sft", [], 3, "--epochs"),
        ("sft", ["model.lora.rank=4"], 2, r"model\.lora"),
    ):
        with pytest.raises(ConfigError, match=f"was started with another {what}"):
            train(goal, folder, tmp_path / "run", ranks, *overrides, epochs=epochs)
    for damage in ("[]", "null", "{"):
        RunDir(tmp_path, "run").fit.write_text(damage)
        with pytest.raises(ConfigError, match=r"fit\.json is damaged: .*restore it from a copy"):
            train("sft", folder, tmp_path / "run", ranks)


def test_an_id_that_the_model_lacks_is_named(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    made = examples("sft", 2)
    made[1][0][0].tokens[3] = 9999
    config, run = config_for(folder), RunDir(tmp_path, "run")
    run.create()
    with pytest.raises(ConfigError, match="encodes the rows with the id 9999, and the model has only those below "):
        fit("sft", made, [], config=config, options=FitOptions(), run_dir=run, ranks=ranks, shutdown=Shutdown())


def test_a_reward_model_scores_in_transformers_as_here(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    assert train("reward", folder, tmp_path / "run", ranks)
    trained = tmp_path / "run" / "trained_model"
    theirs = AutoModelForSequenceClassification.from_pretrained(trained, dtype=torch.float32).eval()
    assert theirs.config.num_labels == 1
    ((side, _), *_) = examples("reward", 1)
    ids = torch.tensor(side[0].tokens).long()[None]
    plain = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)
    hidden = plain.model(input_ids=ids).last_hidden_state[0, -1]
    expected = float(hidden.detach() @ weights(tmp_path / "run")["score.weight"][0])
    assert float(theirs(input_ids=ids).logits.detach()) == pytest.approx(expected, rel=1e-4)
    assert expected != 0
    assert AutoTokenizer.from_pretrained(trained).chat_template


def test_adapters_alone_are_trained_where_that_is_asked_for(folder: Path, tmp_path: Path, ranks: Ranks) -> None:
    assert train("dpo", folder, tmp_path / "run", ranks, "model.lora.rank=4")
    assert (tmp_path / "run" / "trained_adapters" / "adapter_model.safetensors").is_file()
    before, after = load_file(folder / "model.safetensors"), weights(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("proj" in name for name in changed)


def test_every_example_is_seen_once_an_epoch_and_in_another_order_in_the_next() -> None:
    batches = [fit_module._batch_at(step, 10, batch_rows=4, seed=0) for step in range(6)]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(place for places, _ in epoch for place in places) == list(range(10))
        assert [ends for _, ends in epoch] == [False, False, True]
    assert batches[0] != batches[3]
