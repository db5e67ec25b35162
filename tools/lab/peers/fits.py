"""`make bench-fits`: our SFT, DPO and reward model beside TRL's, on the same model, rows, order and settings.

The first loss and the gradient of every parameter are compared, and then the accuracy on held-out rows. Both trained
folders are measured by the same code, with plain transformers.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from slipstream.common.config.config import load_config
from slipstream.common.config.model_config import TinyModelConfig
from slipstream.common.process.run_dir import write_whole
from slipstream.learner.batch.examples import Goal
from slipstream.learner.fit import fit as ours
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.learner.model.optimizer import BETAS, EPS
from slipstream.learner.model.reward_model import RewardModel
from slipstream.learner.objective.preference import preference_loss
from slipstream.learner.ranks.ranks import Ranks, join_ranks, leave_ranks
from slipstream.tools.cli import fit as fit_verb
from slipstream.tools.data.fit_rows import read_samples
from slipstream.tools.lab.bench.benchmark import today
from slipstream.tools.lab.peers.bench import ROOT, TRL_PYTHON
from slipstream.tools.lab.peers.fit_plan import FitPlan
from slipstream.tools.lab.study.page import markdown, with_table
from slipstream.tools.run.tiny_model import make_tiny_model
from slipstream.tools.terminal.options import as_arguments

GOALS = ("sft", "dpo", "reward")
SEEDS = (0, 1, 2)
WORDS = [f"w{number}" for number in range(32)]
NUM_ROWS, NUM_HELD_OUT, EPOCHS, BATCH_ROWS, MAX_TOKENS = 512, 256, 6, 16, 64
LR = {"sft": 3e-3, "dpo": 1e-3, "reward": 3e-3}
TINY = TinyModelConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1)
MAX_FIT_S = 600


def made_rows(goal: str, number: int, rng: random.Random) -> list[dict[str, Any]]:
    """Conversations of a turn, or pairs of them. A reply names the partner of each word of the prompt.

    The partner of a word is the word three further on. The side that is preferred has fewer wrong words.
    """
    rows, seen = list[dict[str, Any]](), set[str]()
    while len(rows) < number:
        prompt = [rng.randrange(len(WORDS)) for _ in range(4)]
        right = [(word + 3) % len(WORDS) for word in prompt]
        question = " ".join(WORDS[word] for word in prompt)
        if question in seen:
            continue
        seen.add(question)
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": question}]}
        if goal == "sft":
            row["completion"] = _reply(right)
        else:
            fewer, more = sorted(rng.sample(range(5), 2))
            row |= {"chosen": _reply(_spoilt(right, fewer, rng)), "rejected": _reply(_spoilt(right, more, rng))}
        rows.append(row)
    return rows


def _reply(words: Sequence[int]) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": " ".join(WORDS[word] for word in words)}]


def _spoilt(words: Sequence[int], number: int, rng: random.Random) -> list[int]:
    places = set(rng.sample(range(len(words)), number))
    return [(word + rng.randrange(1, len(WORDS))) % len(WORDS) if n in places else word for n, word in enumerate(words)]


def plan_of(goal: str, seed: int, folder: Path) -> FitPlan:
    """Make the model and the rows of a comparison in `folder`."""
    rows = made_rows(goal, NUM_ROWS + NUM_HELD_OUT, random.Random(seed))
    make_tiny_model(folder / "model", texts=[" ".join(WORDS)], config=TINY, max_tokens=MAX_TOKENS, seed=seed)
    head = torch.randn(1, TINY.hidden_size, generator=torch.Generator().manual_seed(seed))
    save_file({"score.weight": head}, folder / "head.safetensors")
    steps = EPOCHS * -(-NUM_ROWS // BATCH_ROWS)
    order = [
        place for step in range(steps) for place in ours._batch_at(step, NUM_ROWS, batch_rows=BATCH_ROWS, seed=seed)[0]
    ]
    plan = FitPlan(
        goal=goal,
        seed=seed,
        model=str(folder / "model"),
        head=str(folder / "head.safetensors"),
        rows=rows[:NUM_ROWS],
        held_out=rows[NUM_ROWS:],
        order=order,
        out=str(folder),
        lr=LR[goal],
        batch_rows=BATCH_ROWS,
        max_tokens=MAX_TOKENS,
        max_grad_norm=1.0,
        betas=BETAS,
        eps=EPS,
        beta=0.1,
    )
    plan.write(folder / "plan.json")
    write_whole(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in plan.rows))
    return plan


def our_settings(plan: FitPlan) -> list[str]:
    return [
        f"model.path={plan.model}",
        f"model.max_tokens={plan.max_tokens}",
        "model.dtype=float32",
        f"optim.lr={plan.lr}",
        f"optim.max_grad_norm={plan.max_grad_norm}",
        f"run.root={plan.out}",
        "run.name=ours",
        f"run.seed={plan.seed}",
    ]


def our_options(plan: FitPlan) -> FitOptions:
    return FitOptions(
        data=f"{plan.out}/rows.jsonl", epochs=EPOCHS, batch_rows=plan.batch_rows, held_out=0.0, beta=plan.beta
    )


def our_first(plan: FitPlan, ranks: Ranks) -> tuple[float, dict[str, Tensor]]:
    """Of the first batch by `slipstream.learner.fit.fit`: the loss, and its gradients by transformers' names."""
    config, options, goal = load_config(None, our_settings(plan)), our_options(plan), cast("Goal", plan.goal)
    samples, _, left_out = read_samples(options, goal=goal)
    (examples,) = fit_verb._examples(config, goal, [samples], left_out, data=options.data)
    if len(examples) != len(plan.rows):
        raise ValueError(f"{len(examples)} of {len(plan.rows)} rows became examples: {left_out}")
    first = [examples[place] for place in plan.order[: plan.batch_rows]]
    fitted = ours._load(goal, config, options, ranks=ranks, num_steps=1)
    if isinstance(fitted.model, RewardModel):
        with torch.no_grad():
            weight = fitted.model.score.weight
            assert isinstance(weight, DTensor)
            weight.to_local().copy_(load_file(plan.head)["score.weight"])
    material = ours._material(fitted, first)
    _, weights, divisor = ours._weights(fitted, material)
    margins = ours._margins(fitted, material) if goal != "sft" else np.zeros(1)
    output_sum = ours._backward(fitted, ours._with_weights(first, weights), divisor=divisor)
    loss = -output_sum / divisor if goal == "sft" else float(preference_loss(margins).mean())
    parameters = [*fitted.model.causal_lm.named_parameters(), *fitted.model.heads()]
    return loss, {name: _whole(each.grad) for name, each in parameters if each.grad is not None}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def run(command: Sequence[str], log: Path) -> None:
    """Run one side to its end. Raises CalledProcessError if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT, timeout=MAX_FIT_S, check=True)


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of two gradients, as a fraction of the largest element of the parameter's gradient.

    Raises ValueError if they are of other parameters.
    """
    theirs = {name.removeprefix("model."): value for name, value in expected.items()}
    own = {name.removeprefix("model."): value for name, value in found.items()}
    if own.keys() != theirs.keys():
        raise ValueError(f"gradients of other parameters: {sorted(own.keys() ^ theirs.keys())}")
    return max(float((own[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items())


@torch.no_grad()
def held_out_accuracy(plan: FitPlan, trained: Path) -> float:
    """The share of held-out tokens that are likeliest (sft), or of held-out pairs that are ordered rightly."""
    tokenizer = AutoTokenizer.from_pretrained(plan.model, trust_remote_code=False)
    if plan.goal == "reward":
        scorer = AutoModelForSequenceClassification.from_pretrained(
            trained, dtype=torch.float32, trust_remote_code=False
        ).eval()

        def score(row: dict[str, Any], side: str) -> float:
            return float(scorer(input_ids=_ids(tokenizer, row, side)[0]).logits)

    else:
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32, trust_remote_code=False).eval()
            for each in (trained, plan.model)
        )
        if plan.goal == "sft":
            return statistics.fmean(_likeliest(policy, *_ids(tokenizer, row, "completion")) for row in plan.held_out)

        def score(row: dict[str, Any], side: str) -> float:
            ids, start = _ids(tokenizer, row, side)
            return _logprob(policy, ids, start) - _logprob(reference, ids, start)

    return statistics.fmean(score(row, "chosen") > score(row, "rejected") for row in plan.held_out)


def _ids(tokenizer: Any, row: dict[str, Any], side: str) -> tuple[Tensor, int]:
    """The tokens of a conversation, and where its reply begins."""
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole)]
    return torch.tensor([ids[1]]), len(ids[0])


def _likeliest(model: Any, ids: Tensor, start: int) -> float:
    return float((model(input_ids=ids).logits[0, start - 1 : -1].argmax(-1) == ids[0, start:]).float().mean())


def _logprob(model: Any, ids: Tensor, start: int) -> float:
    logprobs = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
    return float(logprobs.gather(-1, ids[0, start:, None]).sum())


def compared(goal: str, seed: int, folder: Path, *, trl_python: str, ranks: Ranks) -> dict[str, Any]:
    """Run both sides of a comparison, and return its numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(goal, seed, folder)
    run([trl_python, "-P", "-m", "slipstream.tools.lab.peers.trl_fit", str(folder / "plan.json")], folder / "trl.log")
    run(
        [
            sys.executable,
            "-P",
            "-m",
            "slipstream.tools.cli.cli",
            goal,
            *our_settings(plan),
            *as_arguments(our_options(plan)),
        ],
        folder / "ours.log",
    )
    loss, gradient = our_first(plan, ranks)
    trl_loss = json.loads((folder / "first_loss.json").read_text())
    return {
        "goal": goal,
        "seed": seed,
        "loss": loss,
        "trl_loss": trl_loss,
        "gradient_difference": furthest(gradient, load_file(folder / "gradients.safetensors")),
        "accuracy": held_out_accuracy(plan, folder / "ours" / "trained_model"),
        "trl_accuracy": held_out_accuracy(plan, folder / "trained_model"),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """In Markdown, a row for each goal and seed."""
    head = ["fit", "seed", "first loss", "TRL's", "gradients differ by", "held-out accuracy", "TRL's"]
    rows = [
        [
            each["goal"],
            str(each["seed"]),
            f"{each['loss']:.6f}",
            f"{each['trl_loss']:.6f}",
            f"{each['gradient_difference']:.1e}",
            f"{each['accuracy']:.1%}",
            f"{each['trl_accuracy']:.1%}",
        ]
        for each in results
    ]
    return markdown(head, rows)


def main(arguments: Sequence[str]) -> None:
    """Compare every goal and seed, and write the table into the page."""
    parser = argparse.ArgumentParser(prog="bench_fits", description=__doc__)
    parser.add_argument("--goals", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--folder", type=Path, default=Path("build/bench_fits"), help="where results are written")
    parser.add_argument("--docs", type=Path, default=Path("docs/studies"), help="where the page is")
    parser.add_argument("--trl-python", default=TRL_PYTHON, help="the Python of the environment with TRL")
    options = parser.parse_args(arguments)
    page = options.docs / "fits.md"
    text, results = page.read_text(), list[dict[str, Any]]()
    ranks = join_ranks(timeout_s=60.0)
    try:
        for goal in options.goals:
            for seed in options.seeds:
                folder = options.folder.resolve() / f"{goal}-seed{seed}"
                shutil.rmtree(folder, ignore_errors=True)
                results.append(compared(goal, seed, folder, trl_python=options.trl_python, ranks=ranks))
                print(results[-1], flush=True)
    finally:
        leave_ranks()
    write_whole(page, with_table(text, f"{table(results)}\n`python -m slipstream.tools.lab.peers.fits`, {today()}.\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
