"""The loop by hand: one process per core plays its groups with vLLM, then trains on them, in turn.

`python -m slipstream.tools.lab.peers.by_hand CONFIG MODEL OUT --rank R --num-ranks N --store FILE`. It has no queue, no
ledger and no checkpoint: this is the least that training on a task costs. Groups of equal returns are replaced at once,
or kept with `replay.drop_zero_variance=false`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from slipstream.common.config.config import Config, load_config
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.credit.grpo import standardised_advantages
from slipstream.learner.model.optimizer import make_optimizer, make_schedule
from slipstream.tools.lab.peers.episode import Episode, Episodes, returns_differ
from slipstream.tools.lab.peers.hand_engine import HandEngine
from slipstream.tools.lab.peers.peer_run import PeerRun, Success
from slipstream.tools.run.prepare import load_tokenizer

TIMEOUT = timedelta(minutes=10)


class HandRank:
    """One of the processes: its engine, its copy of the model, and its share of the groups."""

    def __init__(self, config: Config, folder: Path, *, rank: int, num_ranks: int, store: Path) -> None:
        """The ranks meet in the file `store`, which must not exist before the first of them."""
        self._config, self._rank, self._num_ranks = config, rank, num_ranks
        self._episodes = Episodes(config=config, tokenizer=load_tokenizer(folder, config.model))
        # vLLM has a process group too, and torch knows only one default group.
        self._peers: Any = ProcessGroupGloo(FileStore(str(store), num_ranks), rank, num_ranks, TIMEOUT)
        self._engine = HandEngine(folder, config, seed=config.run.seed * num_ranks + rank)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self._optimizer = make_optimizer(self._model, config=config.optim)
        self._schedule = make_schedule(self._optimizer, config=config.optim, num_steps=config.learner.steps)
        self._next_group = rank
        self._counts = torch.zeros(4, dtype=torch.float64)  # episodes, tokens, successes, trained tokens

    def step(self) -> None:
        """Play this rank's groups and train on them."""
        self._train(self._play())
        self._engine.load({name: weight.detach() for name, weight in self._model.named_parameters()})

    def success(self) -> Success:
        """Held-out success of the weights. Every rank calls it, and plays its share of the tasks."""
        num_tasks = num_held_out(self._config)
        mine = range(self._rank, num_tasks, self._num_ranks)
        solved = []
        for temperature in (self._config.sampling.temperature, 0.0):
            episodes = self._episodes.held_out(mine)
            self._engine.play(episodes, temperature=temperature, ended=lambda _: ())
            solved.append(sum(episode.success for episode in episodes))
        sampled, greedy = (self._summed(torch.tensor(solved, dtype=torch.float64)) / num_tasks).tolist()
        return Success(sampled=sampled, greedy=greedy)

    def count_into(self, run: PeerRun) -> None:
        """Set the counts of all ranks in `run`. Every rank calls it."""
        counts = self._summed(self._counts.clone())
        run.episodes, run.tokens, run.successes, run.trained_tokens = (int(count) for count in counts)

    def _play(self) -> list[list[Episode]]:
        """This rank's share of the groups of a step: those of equal returns are replaced, unless all are kept."""
        useful: list[list[Episode]] = []
        group_of: dict[int, list[Episode]] = {}

        def begun() -> list[Episode]:
            group = self._episodes.group(self._next_group)
            self._next_group += self._num_ranks
            group_of.update((id(episode), group) for episode in group)
            return group

        def ended(episode: Episode) -> Sequence[Episode]:
            group = group_of[id(episode)]
            self._counts[:3] += torch.tensor([1, len(episode.tokens), episode.success])
            if not all(member.done for member in group):
                return ()
            if returns_differ(group) or not self._config.replay.drop_zero_variance:
                useful.append(group)
                return ()
            return begun()

        num_groups = self._config.replay.groups_per_step // self._num_ranks
        first = [episode for _ in range(num_groups) for episode in begun()]
        self._engine.play(first, temperature=self._config.sampling.temperature, ended=ended)
        return useful

    def _train(self, groups: Sequence[Sequence[Episode]]) -> None:
        """One optimizer step on the policy gradient, a mean over the sampled tokens of all ranks.

        loss = -sum(advantage * logprob) / tokens. The weights that sampled are those that train, so every ratio is 1.
        """
        advantages = {
            id(episode): advantage
            for group in groups
            for episode, advantage in zip(
                group, standardised_advantages([episode.total_reward for episode in group]), strict=True
            )
        }
        episodes = sorted((episode for group in groups for episode in group), key=lambda each: len(each.tokens))
        self._counts[3] += sum(len(episode.tokens) for episode in episodes)
        (num_tokens,) = self._summed(torch.tensor([sum(sum(each.loss_mask) for each in episodes)], dtype=torch.float64))
        for batch in _batches(episodes, max_tokens=self._config.learner.micro_batch_tokens):
            tokens = _padded([torch.tensor(each.tokens) for each in batch])
            sampled = _padded([torch.tensor(each.loss_mask) for each in batch])[:, 1:]
            weights = torch.tensor([advantages[id(each)] for each in batch], dtype=torch.float32)[:, None]
            # Padding is at the end, where causal attention never sees it, so no mask is needed.
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1] / self._config.sampling.temperature
            logprobs = -cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            (-(weights * sampled * logprobs).sum() / num_tokens.float()).backward()
        self._add_gradients()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optim.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()

    def _add_gradients(self) -> None:
        gradients = [weight.grad for weight in self._model.parameters()]
        flat = self._summed(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks."""
        self._peers.allreduce([values]).wait()
        return values


def _batches(episodes: Sequence[Episode], *, max_tokens: int) -> Iterator[list[Episode]]:
    """Consecutive episodes, sorted by length, with at most `max_tokens` tokens with their padding."""
    batch: list[Episode] = []
    for episode in episodes:
        if batch and (len(batch) + 1) * len(episode.tokens) > max_tokens:
            yield batch
            batch = []
        batch.append(episode)
    if batch:
        yield batch


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def main(arguments: Sequence[str]) -> None:
    """Train for `learner.steps` steps, measure, and write the result from rank 0."""
    parser = argparse.ArgumentParser(prog="by_hand", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("--rank", "--num-ranks"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args(arguments)
    config = load_config(options.config, [])
    torch.set_num_threads(1)
    rank = HandRank(config, options.model, rank=options.rank, num_ranks=options.num_ranks, store=options.store)
    run = PeerRun()
    run.begin(rank.success(), fresh=config.eval.every == 0)
    for step in range(1, config.learner.steps + 1):
        rank.step()
        rank.count_into(run)
        run.end_step(step, every=config.eval.every, last=config.learner.steps, success=rank.success)
    if options.rank == 0:
        run.write(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
