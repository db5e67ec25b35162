"""TRL's SFTTrainer, DPOTrainer or RewardTrainer on the rows of a comparison; it runs in build/peers-trl.

`python -m slipstream.tools.lab.peers.trl_fit PLAN`, the JSON file of a `FitPlan`. It writes the first loss and its
gradients, and then the trained model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from slipstream.tools.lab.peers.fit_plan import FitPlan

TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}


def trainer_of(plan: FitPlan, model: Any, tokenizer: Any) -> Any:
    """The trainer of the plan: its rows in their order, AdamW at a constant rate, as few other settings as possible."""
    trainer, config = TRAINERS[plan.goal]
    args = config(
        output_dir=str(Path(plan.out) / "trainer"),
        per_device_train_batch_size=plan.batch_rows,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=plan.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=plan.max_grad_norm,
        adam_beta1=plan.betas[0],
        adam_beta2=plan.betas[1],
        adam_epsilon=plan.eps,
        max_length=plan.max_tokens,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1_000_000,
        seed=plan.seed,
        **({"beta": plan.beta} if plan.goal == "dpo" else {}),
    )
    return trainer(
        model=model, args=args, train_dataset=Dataset.from_list(plan.ordered_rows), processing_class=tokenizer
    )


def model_of(plan: FitPlan) -> Any:
    if plan.goal != "reward":
        return AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32, trust_remote_code=False)
    return AutoModelForSequenceClassification.from_pretrained(
        plan.model, num_labels=1, dtype=torch.float32, trust_remote_code=False
    )


def first_gradient(plan: FitPlan, trainer: Any) -> float:
    """Write the gradients of the first batch, and return its loss. Nothing is updated."""
    model = trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {
        name: each.grad.contiguous().clone() for name, each in model.named_parameters() if each.grad is not None
    }
    save_file(gradients, Path(plan.out) / "gradients.safetensors")
    model.zero_grad()
    return float(loss.detach())


def main(arguments: list[str]) -> None:
    plan = FitPlan.read(Path(arguments[0]))
    set_seed(plan.seed)
    torch.set_num_threads(1)
    model, tokenizer = model_of(plan), AutoTokenizer.from_pretrained(plan.model, trust_remote_code=False)
    if plan.goal == "reward":
        model.config.pad_token_id = tokenizer.pad_token_id
        with torch.no_grad():
            model.score.weight.copy_(load_file(plan.head)["score.weight"])
    trainer = trainer_of(plan, model, tokenizer)
    loss = first_gradient(plan, trainer)
    if plan.goal == "reward":
        with torch.no_grad():
            model.score.weight.zero_()  # where our reward model begins
    trainer.train()
    trainer.save_model(str(Path(plan.out) / "trained_model"))
    (Path(plan.out) / "first_loss.json").write_text(json.dumps(loss))


if __name__ == "__main__":
    main(sys.argv[1:])
