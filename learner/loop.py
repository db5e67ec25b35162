"""The loop, to read: play a group of attempts at each task, compare them, compute the loss, make a step; and again.

    python -m slipstream.learner.loop FILE.yaml model.path=FOLDER [SETTING=VALUE ...]

One process on CPUs, in which no policy is ever old and nothing outlives a crash. `slipstream up` is the same loop,
asynchronous and durable: actors play without pause, a buffer in Redis counts every trajectory exactly once, and the
objective corrects for the age of the policy that sampled a token. With `replay.target_lag=0` it has the same losses, to
the last bit (tests/whole/test_loop_to_read.py). Where the system does what is done here:

    Engine   actors/engine, actors/weights; learner/publisher
    play     actors/episode, actors/group
    compared learner/credit
    step     learner/batch, learner/objective, learner/step
    train    learner/learn.py with learner/supply; actors/host/act.py; replay between them
"""

import asyncio
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")  # vLLM reads them when imported
os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
from vllm import EngineArgs, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from slipstream import Config, LossTokens, Message, Task, load_config, make_env, policy_loss
from slipstream.actors.engine import reload, vllm_start
from slipstream.common.text import action_format, chat, tokenizer
from slipstream.learner.batch.pack import TokenSequence, micro_batches, numbered
from slipstream.learner.model import context_attention, kernel, optimizer, packed_model

# What this loop is written for; the system has the rest.
WRITTEN_FOR = {
    "objective.advantage": "group_standardised",
    "objective.allocation": "last_token",
    "objective.critic": "none",
    "objective.kl_coefficient": 0.0,
    "objective.normalisation": "tokens",
    "replay.drop_zero_variance": False,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "warm_start.episodes": 0,
}


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One attempt at a task. Element i of each list belongs to token i of its whole conversation."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(
        default_factory=list
    )  # by the policy; the others are the chat template's and the task's
    logprobs: list[float] = field(default_factory=list)  # by the policy that sampled them; 0 for the others
    rewards: list[float] = field(default_factory=list)  # one a turn

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Add tokens, with their log-probabilities if the policy sampled them."""
        self.tokens += tokens
        self.sampled += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs


class Engine:
    """vLLM in this process: many requests at a time, each with the log-probability of every token."""

    def __init__(self, config: Config) -> None:
        self._config, self._waiting, self._num_requests = config, dict[str, asyncio.Future[CompletionOutput]](), 0
        self._stop = vllm_start.stop_token_ids(config.model.path)
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(
                model=config.model.path,
                dtype="float32",
                max_model_len=config.model.max_tokens,
                skip_tokenizer_init=True,
                generation_config="vllm",
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                kv_cache_memory_bytes=config.actors.kv_cache_bytes or vllm_start.CPU_KV_CACHE_BYTES,
                **vllm_start.CPU_OPTIONS,
            )
        )

    async def sample(self, prompt: Sequence[int], *, seed: int) -> CompletionOutput:
        """What the policy writes after `prompt`, up to an end-of-turn token."""
        sampling, room = self._config.sampling, self._config.model.max_tokens - len(prompt)
        params = SamplingParams(
            temperature=sampling.temperature,
            seed=seed,
            max_tokens=min(sampling.max_turn_tokens, room),
            stop_token_ids=self._stop,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        self._llm.add_request(str(self._num_requests), {"type": "token", "prompt_token_ids": list(prompt)}, params)
        self._waiting[str(self._num_requests)] = asyncio.get_running_loop().create_future()
        return await self._waiting[str(self._num_requests)]

    def step(self) -> None:
        """Compute the next token of every request; those that have ended continue with the result."""
        for output in self._llm.step():
            self._waiting.pop(output.request_id).set_result(output.outputs[0])

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample with `weights` from now on."""
        self._llm.collective_rpc(_load, args=(weights,))
        self._llm.reset_prefix_cache()


def _load(worker: Any, weights: Mapping[str, Tensor]) -> None:
    reload.loaded_on_cpu(worker.get_model(), dict(weights), worker.model_config).switch()


async def play(engine: Engine, config: Config, task: Task, *, group: int, member: int) -> Attempt:
    """Play one attempt: what the policy writes is an action, and the environment's answer the next prompt."""
    attempt, form = Attempt(), action_format.format_of(config.env)
    conversation = chat.Chat(
        tokenizer.load_tokenizer(config.model.path, config.model.template_arguments),
        rules=chat.ChatRules.of(config.model),
    )
    env = make_env(config.env.name, config.env.options)
    observation = await env.reset(task)
    attempt.add(conversation.open(_with(form.instructions, tuple(observation.messages))))
    while len(attempt.rewards) < config.env.max_turns and len(attempt.tokens) < config.model.max_tokens:
        seed = _seed(config.run.seed, group, member, 0, len(attempt.rewards))
        written = await engine.sample(attempt.tokens, seed=seed)
        attempt.add(written.token_ids, written.logprobs.logprobs)
        conversation.reply(list(written.token_ids))
        observation = await env.step(form.parse(conversation.answer).text)
        attempt.rewards.append(math.fsum(observation.rewards.values()))
        if observation.done:
            break
        extension = conversation.extend(tuple(observation.messages))
        if extension.new_branch:
            raise ValueError("the chat template rewrites what was said before; `slipstream up` trains such models")
        attempt.add(extension.tokens)
    await env.close()
    return attempt


def _with(instructions: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The first messages, with how to write an action in the system message."""
    if not instructions:
        return messages
    if messages[0].role == "system":
        return (Message("system", f"{messages[0].content}\n{instructions}"), *messages[1:])
    return (Message("system", instructions), *messages)


def _seed(*numbers: int) -> int:
    """A seed for each turn of each attempt of each group, so that the same weights always write the same."""
    mixed = numbers[0]
    for number in numbers[1:]:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 62)
    return mixed


def task_of(group: int, config: Config) -> Task:
    """The task of a group: all tasks come once, in a random order, before one comes twice."""
    lap, place = divmod(group, config.env.num_train_tasks)
    order = np.random.default_rng((config.run.seed, lap)).permutation(config.env.num_train_tasks)
    return Task(env=config.env.name, split="train", index=int(order[place]))


async def play_groups(engine: Engine, config: Config, groups: range) -> list[list[Attempt]]:
    """Play every attempt of `groups` at the same time."""
    members = range(config.replay.group_size)
    players = [
        [
            asyncio.create_task(play(engine, config, task_of(group, config), group=group, member=each))
            for each in members
        ]
        for group in groups
    ]
    while not all(player.done() for player in chain.from_iterable(players)):
        await asyncio.sleep(0)  # each player goes on to its next request
        engine.step()
    return [[player.result() for player in group] for group in players]


def compared(group: Sequence[Attempt]) -> list[float]:
    """The advantage of each attempt of a group: how much better it is than its siblings, in their standard deviations.

    GRPO, https://arxiv.org/abs/2402.03300. The siblings are the baseline, so that no critic is needed.
    """
    returns = np.array([math.fsum(attempt.rewards) for attempt in group])
    return list((returns - returns.mean()) / (returns.std(ddof=1) + 1e-6))


def batch_of(groups: Sequence[Sequence[Attempt]]) -> list[TokenSequence]:
    """The sequences to train: every sampled token of an attempt has the attempt's advantage."""
    return numbered(
        [
            TokenSequence(
                tokens=np.array(attempt.tokens, dtype=np.int32),
                loss_mask=np.array(attempt.sampled),
                behaviour_logprobs=np.array(attempt.logprobs, dtype=np.float32),
                advantages=np.full(len(attempt.tokens), advantage, dtype=np.float32),
                kept=None,
            )
        ]
        for group in groups
        for attempt, advantage in zip(group, compared(group), strict=True)
    )


class Policy:
    """The model that is trained, and its optimizer."""

    def __init__(self, config: Config) -> None:
        AttentionInterface.register(kernel.PACKED_ATTENTION, context_attention.attention)
        causal_lm = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation=kernel.PACKED_ATTENTION
        )
        settings = packed_model.ModelSettings.of(config)
        self._config = config
        self.model = packed_model.PackedModel(causal_lm, folder=Path(config.model.path), settings=settings).eval()
        self.model.shares_prefixes = True
        self._optimizer = optimizer.make_optimizer(causal_lm, config=config.optim)
        self._schedule = optimizer.make_schedule(self._optimizer, config=config.optim, num_steps=config.learner.steps)

    def step(self, batch: Sequence[TokenSequence]) -> float:
        """Make one step on `batch`, with a mean over its sampled tokens as the loss; return the loss."""
        num_tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
        losses = list[Tensor]()
        room = self._config.learner.micro_batch_tokens
        for packed in micro_batches(batch, max_tokens=room, num_ranks=1, rank=0, share_prefixes=True):
            current = self.model(packed)
            tokens = LossTokens(
                current_logprobs=current.logprobs,
                behaviour_logprobs=packed.behaviour_logprobs[packed.loss_positions],
                advantages=packed.advantages[packed.loss_positions],
                entropies=current.entropies,
                lags=packed.loss_lags,
                sequences=packed.loss_sequences,
            )
            loss_sum = policy_loss(tokens, objective=self._config.objective).loss_sum
            (loss_sum * (1 / num_tokens)).backward()
            losses.append(loss_sum.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optim.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).sum()) / num_tokens


def train(config: Config) -> Iterator[float]:
    """Make `learner.steps` steps, and yield the loss of each."""
    torch.manual_seed(config.run.seed)
    engine, policy, num_groups = Engine(config), Policy(config), config.replay.groups_per_step
    for step in range(config.learner.steps):
        groups = range(step * num_groups, (step + 1) * num_groups)
        played = asyncio.run(play_groups(engine, config, groups))
        yield policy.step(batch_of(played))
        engine.load(dict(policy.model.causal_lm.named_parameters()))


def main(arguments: Sequence[str]) -> None:
    """Print the loss of each step."""
    config = load_config(arguments[0], list(arguments[1:]))
    for key, wanted in WRITTEN_FOR.items():
        section, _, name = key.partition(".")
        if (found := getattr(getattr(config, section), name)) != wanted:
            raise SystemExit(f"{key} must be {wanted} here, got {found}; `slipstream up` has the rest")
    for step, loss in enumerate(train(config), start=1):
        print(f"step {step}: loss {loss!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
