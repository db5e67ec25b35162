"""A game that a tiny model learns in a few steps: two turns of two tokens each, and even tokens earn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel, Qwen3ForCausalLM

from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Trajectory, Turn, VersionSpan, pack_logprobs, pack_mask, pack_tokens
from slipstream.learner.batch.batch import Batch
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.measure import measure
from slipstream.learner.learner import Learner, begin, begin_checkpoint, load_learner, train_on
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.replay.records.ticket import Group
from tests.replay.records.attempts import ticket, turn
from tests.tools.run.tiny_model import a_trajectory, without_absent

SAMPLED = (False, False, True, True, False, True, True)  # two prompt tokens, two sampled, one observed, two sampled
TURNS = ((2, 4), (5, 7))
PROMPTS = (10, 11)  # after the first an even token earns 1, after the second 3


def load_player(config: Config, folder: Path, ranks: Ranks) -> tuple[Learner, PreTrainedModel]:
    """A learner in `folder`, and a plain copy of its model that plays."""
    learner = load_learner(config, RunDir(folder, config.run.name), ranks)
    begin(learner)
    plain = Qwen3ForCausalLM.from_pretrained(config.model.path).eval()
    return learner, without_absent(plain, Path(config.model.path))


def train(learner: Learner, player: PreTrainedModel, *, steps: int) -> tuple[list[StepMetrics], list[float]]:
    """The metrics of each step, and the mean reward of what the learner's own weights played for it."""
    metrics, rewards = [], []
    for _ in range(steps):
        batch = play(learner, player)
        rewards.append(float(np.mean([t.total_reward for group in batch.groups for t in group.trajectories])))
        metrics.append(train_on(learner, batch, Clock(learner.ranks.device)))
    return metrics, rewards


def values_of(
    learner: Learner, sequences: Sequence[TokenSequence], *, micro_batch_tokens: int
) -> npt.NDArray[np.float64]:
    """The critic's values of all sampled tokens."""
    others = {"objective": learner.config.objective, "micro_batch_tokens": micro_batch_tokens}
    return measure(sequences, models=learner.models, ranks=learner.ranks, **others).values


def save(learner: Learner) -> None:
    """A durable checkpoint."""
    begin_checkpoint(learner)
    learner.checkpoints.wait()


def play(learner: Learner, player: PreTrainedModel, *, num_groups: int = 4, group_size: int = 8) -> Batch:
    player.load_state_dict(dict(full_tensors(learner.model)), strict=False)
    step = learner.progress.step
    prompts = [PROMPTS[group % 2] for group in range(num_groups) for _ in range(group_size)]
    tokens, logprobs = _sampled(player, prompts, seed=step)
    version = learner.progress.policy_version
    trajectories = [_trajectory(*row, version=version) for row in zip(tokens, logprobs, strict=True)]
    groups = [
        group_of(trajectories[first : first + group_size], group_id=step * num_groups + number)
        for number, first in enumerate(range(0, len(prompts), group_size))
    ]
    return Batch(groups=groups, num_dropped={}, next_group_id=(step + 1) * num_groups)


def recorded(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    sampled: Sequence[bool],
    *,
    turns: Sequence[Turn] = (),
    branch_starts: Sequence[int] = (0,),
) -> Trajectory:
    """A trajectory of these tokens."""
    bare = a_trajectory(
        tokens=pack_tokens(list(tokens)),
        behaviour_logprobs=pack_logprobs(list(logprobs)),
        loss_mask=pack_mask(list(sampled)),
        branch_starts=list(branch_starts),
    )
    return replace(bare, turns=list(turns))


def group_of(trajectories: Sequence[Trajectory], *, group_id: int = 0) -> Group:
    first = trajectories[0]
    asked = ticket(group_id, num_members=len(trajectories))
    asked = replace(asked, task=first.task, sampling=first.sampling, seed=0)
    members = [replace(each, group_id=group_id, member=member) for member, each in enumerate(trajectories)]
    return Group(ticket=asked, num_uses=1, trajectories=members)


def rewards_of(tokens: Sequence[int]) -> list[float]:
    """Of each turn: the share of even tokens, by what the prompt makes of it."""
    worth = 1.0 if tokens[0] == PROMPTS[0] else 3.0
    return [worth * sum(token % 2 == 0 for token in tokens[start:stop]) / 2 for start, stop in TURNS]


@torch.no_grad()
def _sampled(
    player: PreTrainedModel, prompts: Sequence[int], *, seed: int
) -> tuple[list[list[int]], list[list[float]]]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[prompt, 1] for prompt in prompts])
    logprobs = torch.zeros(tokens.shape)
    for sampled in SAMPLED[2:]:
        following, logprob = torch.full((len(prompts), 1), 2), torch.zeros(len(prompts), 1)
        if sampled:
            found = player(tokens).logits[:, -1].log_softmax(-1)
            following = torch.multinomial(found.exp(), 1, generator=draw)
            logprob = found.gather(1, following)
        tokens, logprobs = torch.cat([tokens, following], 1), torch.cat([logprobs, logprob], 1)
    return tokens.tolist(), logprobs.tolist()


def _trajectory(tokens: list[int], logprobs: list[float], *, version: int) -> Trajectory:
    turns = [turn(*place, rewards={"even": reward}) for place, reward in zip(TURNS, rewards_of(tokens), strict=True)]
    spans = [VersionSpan(start=start, stop=stop, policy_version=version) for start, stop in TURNS]
    bare = recorded(tokens, np.minimum(logprobs, 0.0).tolist(), SAMPLED, turns=turns)
    return replace(bare, version_spans=spans)
