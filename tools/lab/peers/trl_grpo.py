"""TRL's GRPOTrainer on our task, with transformers' own generation; it runs in build/peers-trl.

`python -m slipstream.tools.lab.peers.trl_grpo CONFIG MODEL OUT [--changes JSON]`. A `rollout_func` plays the episodes
turn by turn: TRL's other way, `environment_factory`, makes every action a tool call, which another prompt would have
to explain.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from slipstream.common.config.config import Config, load_config
from slipstream.envhub.catalogue import num_held_out
from slipstream.tools.lab.peers.episode import Episode, Episodes
from slipstream.tools.lab.peers.peer_run import PeerRun, Success

EVAL_BATCH = 64  # episodes at a time


class Player:
    """Plays episodes in lockstep: the turns of all running ones are generated as one batch."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._episodes = Episodes(config=config, tokenizer=tokenizer)
        self._next_group = 0
        self.run = PeerRun()

    def rollout(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: one group for every `group_size` of `prompts`, whose text is not used."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        groups = range(self._next_group, self._next_group + len(prompts) // self._config.replay.group_size)
        self._next_group = groups.stop
        trained = [episode for group in groups for episode in self._episodes.group(group)]
        self._play(model, trained, temperature=self._config.sampling.temperature)
        self.run.episodes += len(trained)
        self.run.successes += sum(episode.success for episode in trained)
        self.run.tokens += sum(len(episode.tokens) for episode in trained)
        self.run.trained_tokens += sum(len(episode.tokens) for episode in trained)
        return {
            "prompt_ids": [episode.tokens[: episode.prompt_length] for episode in trained],
            "completion_ids": [episode.tokens[episode.prompt_length :] for episode in trained],
            "env_mask": [[int(mask) for mask in episode.loss_mask[episode.prompt_length :]] for episode in trained],
            "logprobs": None,  # needed only where another engine samples
            "total_reward": [episode.total_reward for episode in trained],
        }

    def success(self, model: Any) -> Success:
        """Held-out success of the weights."""
        sampled, greedy = (self._solved(model, temperature) for temperature in (self._config.sampling.temperature, 0.0))
        return Success(sampled=sampled, greedy=greedy)

    def _solved(self, model: Any, temperature: float) -> float:
        num_tasks, num_solved = num_held_out(self._config), 0
        for start in range(0, num_tasks, EVAL_BATCH):
            episodes = self._episodes.held_out(range(start, min(start + EVAL_BATCH, num_tasks)))
            self._play(model, episodes, temperature=temperature)
            num_solved += sum(episode.success for episode in episodes)
        return num_solved / num_tasks

    def _play(self, model: Any, episodes: Iterable[Episode], *, temperature: float) -> None:
        running = list(episodes)
        while running:
            for episode, sampled in zip(running, self._sampled(model, running, temperature), strict=True):
                episode.answer(sampled)
            running = [episode for episode in running if not episode.done]

    @torch.inference_mode()
    def _sampled(self, model: Any, episodes: Sequence[Episode], temperature: float) -> list[list[int]]:
        """The next turn of each episode. A prompt is read again in each turn: `generate` keeps no cache between two."""
        batch = self._tokenizer.pad(
            {"input_ids": [episode.tokens for episode in episodes]}, padding_side="left", return_tensors="pt"
        )
        end, padding = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        generation = GenerationConfig(
            max_new_tokens=max(episode.room for episode in episodes), eos_token_id=end, pad_token_id=padding, **sampling
        )
        rows = model.generate(**batch, generation_config=generation)[:, batch["input_ids"].shape[1] :].tolist()
        return [
            row[: min(episode.room, row.index(end) + 1 if end in row else len(row))]
            for row, episode in zip(rows, episodes, strict=True)
        ]


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Measures the first weights, and each step."""

    def __init__(self, player: Player, config: Config) -> None:
        self._player, self._config = player, config

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the first weights, and start the clock."""
        self._player.run.begin(self._player.success(others["model"]), fresh=self._config.eval.every == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure the weights of this step if that is due."""
        success = partial(self._player.success, others["model"])
        every, last = self._config.eval.every, self._config.learner.steps
        self._player.run.end_step(state.global_step, every=every, last=last, success=success)


def grpo_config(config: Config, folder: Path, changes: Mapping[str, Any]) -> GRPOConfig:
    """The settings of our run in TRL's terms, with `changes`. What is not named here has TRL's default."""
    settings = dict[str, Any](
        output_dir=str(folder),
        seed=config.run.seed,
        use_cpu=True,
        bf16=False,
        max_steps=config.learner.steps,
        per_device_train_batch_size=config.replay.group_size * config.replay.groups_per_step,
        gradient_accumulation_steps=1,
        num_generations=config.replay.group_size,
        max_completion_length=config.model.max_tokens,
        temperature=config.sampling.temperature,
        learning_rate=config.optim.lr,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(config.optim.schedule, config.optim.schedule),
        warmup_steps=config.optim.warmup_steps,
        weight_decay=config.optim.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=config.optim.max_grad_norm,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=config.eval.every or 1,
        disable_tqdm=True,
    )
    return GRPOConfig(**{**settings, **changes})


def total_reward(total_reward: list[float], **others: Any) -> list[float]:
    """TRL's reward function: the returns that `rollout` put beside the episodes."""
    return total_reward


def main(arguments: Sequence[str]) -> None:
    """Train for `learner.steps` steps, and write the result."""
    parser = argparse.ArgumentParser(prog="trl_grpo", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--changes", type=json.loads, default={}, help="fields of GRPOConfig, as JSON")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    config = load_config(options.config, [])
    torch.set_num_threads(options.threads)
    set_seed(config.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    player = Player(config, tokenizer)
    num_prompts = config.learner.steps * config.replay.groups_per_step
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, trust_remote_code=False),
        reward_funcs=total_reward,
        args=grpo_config(config, options.out.with_suffix(".trl"), options.changes),
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(num_prompts)]}),
        processing_class=tokenizer,
        rollout_func=player.rollout,
        callbacks=[Evaluations(player, config)],
    )
    trainer.train()
    player.run.write(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
