"""What a user may have meant by an unknown word: a name that is spelt alike, or the word of another trainer."""

import difflib
from collections.abc import Sequence

# Common names in TRL, verl and their like, and what has that meaning here.
SETTINGS = {
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "grad_clip": "optim.max_grad_norm",
    "model": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "max_length": "model.max_tokens",
    "max_prompt_length": "model.max_tokens",
    "max_model_len": "model.max_tokens",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "max_completion_length": "sampling.max_turn_tokens",
    "max_response_length": "sampling.max_turn_tokens",
    "max_new_tokens": "sampling.max_turn_tokens",
    "num_generations": "replay.group_size",
    "rollout_n": "replay.group_size",
    "train_batch_size": "replay.groups_per_step",
    "per_device_train_batch_size": "replay.groups_per_step",
    "num_iterations": "replay.max_uses",
    "ppo_epochs": "replay.max_uses",
    "max_staleness": "replay.max_lag",
    "beta": "objective.kl_coefficient",
    "kl_coef": "objective.kl_coefficient",
    "kl_loss_coef": "objective.kl_coefficient",
    "epsilon": "objective.clip_low",
    "clip_ratio": "objective.clip_low",
    "clip_ratio_low": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "clip_ratio_high": "objective.clip_high",
    "entropy_coeff": "objective.entropy_bonus",
    "adv_estimator": "objective.advantage",
    "loss_type": "objective.normalisation",
    "loss_agg_mode": "objective.normalisation",
    "ref_model": "objective.reference_model",
    "reward_funcs": "env.rewards",
    "max_steps": "learner.steps",
    "total_training_steps": "learner.steps",
    "save_steps": "learner.checkpoint_every",
    "save_freq": "learner.checkpoint_every",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "n_gpus_per_node": "learner.ranks",
    "nnodes": "learner.hosts",
    "tensor_model_parallel_size": "actors.tensor_parallel",
    "tensor_parallel_size": "actors.tensor_parallel",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "output_dir": "run.root",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "dataset_name": "env.options.train",
    "train_files": "env.options.train",
}
VALUES = {
    "objective.advantage": {
        "grpo": "group_standardised",
        "dr_grpo": "group_centred",
        "rloo": "leave_one_out",
        "ppo": "gae",
        "reinforce_plus_plus": "reinforce_pp",
    },
    "objective.surrogate": {"ppo": "ppo_clip", "grpo": "ppo_clip", "reinforce": "policy_gradient"},
    "objective.correction": {"tis": "truncated_is"},
    "objective.normalisation": {"grpo": "sequences", "dapo": "tokens", "dr_grpo": "constant", "token-mean": "tokens"},
    "optim.schedule": {"constant_with_warmup": "constant"},
}
VERBS = {
    "train": "up",
    "start": "up",
    "grpo": "up",
    "ppo": "up",
    "resume": "up --resume NAME",
    "sft": "fit sft",
    "dpo": "fit dpo",
    "reward": "fit reward",
    "prm": "fit prm",
    "evaluate": "eval",
    "rollout": "collect",
    "generate": "collect",
    "status": "top",
    "list": "runs",
    "dashboard": "view",
    "wandb": "track",
    "merge": "export",
    "check": "doctor",
}


def word_hint(word: str, known: Sequence[str]) -> str:
    """`; did you mean ...?` with the nearest of the `known` words; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def verb_hint(word: str, verbs: Sequence[str]) -> str:
    """`; did you mean ...?` for a verb that does not exist."""
    ours = VERBS.get(word.lower())
    return f"; did you mean `{ours}`?" if ours else word_hint(word, verbs)


def setting_hint(key: str, value: str, paths: Sequence[str]) -> str:
    """`; did you mean ...?` for an unknown setting, with its value if that has another name here too."""
    leaf = key.rsplit(".", 1)[-1].lower()
    same = [path for path in paths if path.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(key, [path for path in paths if "." in key], n=1, cutoff=0.5)
    found = SETTINGS.get(leaf) or (same or near or [""])[0]
    ours = VALUES.get(found, {}).get(value.lower())
    return f"; did you mean `{found}{f'={ours}' if ours else ''}`?" if found else ""


def option_hint(word: str, known: Sequence[str], paths: Sequence[str]) -> str:
    """`; did you mean ...?` for an unknown option such as `--lr=1`: one of the `known`, or a setting of `paths`."""
    flag, _, value = word.partition("=")
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    if near:
        return f"; did you mean `{near[0]}`?"
    return setting_hint(flag.strip("-").replace("-", "_"), value, paths)
