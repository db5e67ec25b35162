"""What a user may have meant by an unknown word: a name with nearly the same letters, or another trainer's word."""

import difflib
from collections.abc import Sequence

# Ours, and the names that TRL, verl and their like have for it.
_SETTINGS = {
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "warmup_ratio lr_warmup_steps",
    "optim.max_grad_norm": "grad_clip",
    "model.path": "model model_name_or_path",
    "model.dtype": "torch_dtype",
    "model.max_tokens": "max_length max_prompt_length max_model_len",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "sampling.max_turn_tokens": "max_completion_length max_response_length max_new_tokens",
    "replay.group_size": "num_generations rollout_n",
    "replay.groups_per_step": "train_batch_size per_device_train_batch_size",
    "replay.max_uses": "num_iterations ppo_epochs",
    "replay.max_lag": "max_staleness",
    "objective.kl_coefficient": "beta kl_coef kl_loss_coef",
    "objective.clip_low": "epsilon clip_ratio clip_ratio_low",
    "objective.clip_high": "epsilon_high clip_ratio_high",
    "objective.entropy_bonus": "entropy_coeff",
    "objective.advantage": "adv_estimator",
    "objective.normalisation": "loss_type loss_agg_mode",
    "objective.reference_model": "ref_model",
    "env.rewards": "reward_funcs",
    "learner.steps": "max_steps total_training_steps",
    "learner.checkpoint_every": "save_steps save_freq",
    "learner.activation_checkpointing": "gradient_checkpointing",
    "learner.ranks": "n_gpus_per_node",
    "learner.hosts": "nnodes",
    "actors.tensor_parallel": "tensor_model_parallel_size tensor_parallel_size",
    "eval.every": "eval_steps test_freq",
    "run.root": "output_dir",
    "run.name": "run_name experiment_name",
    "env.options.train": "dataset_name train_files",
}
_VERBS = {
    "up": "train start grpo ppo",
    "up --resume NAME": "resume",
    "fit sft": "sft",
    "fit dpo": "dpo",
    "fit reward": "reward",
    "fit prm": "prm",
    "eval": "evaluate",
    "collect": "rollout generate",
    "top": "status",
    "runs": "list",
    "view": "dashboard",
    "track": "wandb",
    "export": "merge",
    "doctor": "check",
}
SETTINGS = {theirs: ours for ours, names in _SETTINGS.items() for theirs in names.split()}
VERBS = {theirs: ours for ours, names in _VERBS.items() for theirs in names.split()}
VALUES = {
    "objective.advantage": {
        "grpo": "group_standardised",
        "dr_grpo": "group_centred",
        "rloo": "leave_one_out",
        "ppo": "gae",
        "reinforce_plus_plus": "reinforce_pp",
    },
    "objective.surrogate": {"ppo": "ppo_clip", "grpo": "ppo_clip", "reinforce": "policy_gradient"},
    "objective.correction": {"tis": "token_mask", "truncated_is": "token_mask", "decoupled": "token_mask"},
    "objective.normalisation": {"grpo": "sequences", "dapo": "tokens", "dr_grpo": "constant", "token-mean": "tokens"},
    "optim.schedule": {"constant_with_warmup": "constant"},
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
