"""Episodes of the peers: our environments and our prompts, without our actors.

`tests/tools/lab/test_peers.py` compares their tokens and rewards with those of `actors/episode/rollout.py`. It imports
no torch.
"""

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from slipstream.actors.episode.actions import with_instructions
from slipstream.common.config.config import Config
from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import ActionFormat, format_of
from slipstream.common.text.chat import Chat
from slipstream.envhub.catalogue import make_env, num_train_tasks
from slipstream.learner.supply.curriculum import task_index

RESOLUTION = 1e-6  # returns that differ by less are equal

Answer = TypeVar("Answer")


class Episode:
    """One attempt at a task: sample from `tokens`, and give the result to `answer`, until it is `done`."""

    def __init__(self, task: Task, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._format: ActionFormat = format_of(config.env)
        self._chat = Chat(tokenizer, model=config.model)
        self._env = make_env(config.env.name, config.env.options)
        first = at_once(self._env.reset(task))
        self.tokens = self._chat.open(with_instructions(first.messages, self._format))
        self.loss_mask = [False] * len(self.tokens)
        self.prompt_length = len(self.tokens)
        self.total_reward = 0.0
        self.success = False
        self.done = False
        self._num_turns = 0

    @property
    def room(self) -> int:
        """The most tokens that the next turn may have."""
        return min(self._config.sampling.max_turn_tokens, self._config.model.max_tokens - len(self.tokens))

    def answer(self, sampled: Sequence[int]) -> None:
        """Do the action in the `sampled` tokens, and add the environment's answer to `tokens`."""
        self._add(sampled, trained=True)
        self._num_turns += 1
        self._chat.reply(list(sampled))
        action = self._format.parse(self._chat.answer)
        observation = at_once(self._env.step(action.text))
        self.total_reward += math.fsum(observation.rewards.values())
        self.success = self.success or observation.success
        self.done = observation.done
        if not self.done:
            following = self._chat.extend(observation.messages).tokens
            full = len(self.tokens) + len(following) >= self._config.model.max_tokens
            self.done = full or self._num_turns >= self._config.env.max_turns
            self._add(() if self.done else following, trained=False)

    def _add(self, tokens: Sequence[int], *, trained: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [trained] * len(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """Begins the episodes of a run."""

    config: Config
    tokenizer: PreTrainedTokenizerBase

    def group(self, group_id: int) -> list[Episode]:
        """The members of a group, with the task that our learner would give a group of this number."""
        env, seed = self.config.env, self.config.run.seed
        task = Task(env=env.name, split="train", index=task_index(group_id, num_train_tasks(env)[env.name], seed))
        return [Episode(task, self.config, self.tokenizer) for _ in range(self.config.replay.group_size)]

    def held_out(self, indices: range) -> list[Episode]:
        """One attempt at each held-out task."""
        tasks = [Task(env=self.config.env.name, split="held_out", index=index) for index in indices]
        return [Episode(task, self.config, self.tokenizer) for task in tasks]


def returns_differ(group: Sequence[Episode]) -> bool:
    """Whether the group can teach: with equal returns, all advantages are 0."""
    returns = [episode.total_reward for episode in group]
    return max(returns) - min(returns) > RESOLUTION


def at_once(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine that never waits, as those of `shop`. Raises RuntimeError if it waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    coroutine.close()
    raise RuntimeError("the peers play environments that answer at once only; this one waits")
