"""One run of a study, in this process, with an exact lag.

    weights of version max(0, s - lag) -> episodes -> advantages -> packs -> one optimizer step -> version s + 1

Step s, counted from 0, trains on episodes of the weights from `lag` steps before. Rollout, records, advantages,
objective and optimizer are those of a real run. Only the processes between them are missing, as they would let the lag
vary.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slipstream.common.config.config import Config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records import frame_file
from slipstream.envhub.catalogue import num_held_out
from slipstream.learner.batch.batch import Batch
from slipstream.learner.learner import Learner, begin, load_learner, train_on
from slipstream.learner.model.export import save_hf
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.clock import Clock
from slipstream.learner.step.step_metrics import StepMetrics
from slipstream.learner.warm_start import imitate
from slipstream.tools.lab.study.episodes import NothingToLearn, StudySetup, harvest, held_out
from slipstream.tools.lab.study.sampler import LockstepSampler
from slipstream.tools.run.prepare import load_tokenizer, prepare

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStep:
    """One optimizer step."""

    batch: Batch
    success: float  # of all episodes that were sampled for the step
    metrics: StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The measurements of one run; element s of each list is of step s."""

    success: list[float]  # of all episodes that were sampled for the step
    steps: list[StepMetrics]
    held_out: float  # success of the last weights, of one sampled episode of each held-out task
    episodes: int  # sampled for all steps, including those of dropped groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """A learner that trains on episodes of its former weights, with an exact lag."""

    learner: Learner
    setup: StudySetup
    lag: int
    snapshots: deque[Weights]  # of the newest versions, beginning with the oldest one that is needed

    def step(self) -> StudyStep:
        """Make one optimizer step. Raises NothingToLearn."""
        learner = self.learner
        before = learner.progress
        behaviour_version = max(0, before.policy_version - self.lag)
        self.setup.sampler.load(self.snapshots[behaviour_version - before.policy_version - 1], behaviour_version)
        harvested = harvest(self.setup, first_group_id=before.next_group_id, policy_version=behaviour_version)
        metrics = train_on(learner, harvested.batch, Clock(learner.ranks.device))
        self.snapshots.append(snapshot(learner))
        return StudyStep(batch=harvested.batch, success=harvested.success, metrics=metrics)


def snapshot(learner: Learner) -> Weights:
    return {name: tensor.clone() for name, tensor in full_tensors(learner.model)}


def practice(config: Config, *, lag: int, ranks: Ranks, runner: asyncio.Runner) -> Practice:
    """A run that begins with the model in `model.path`, with one slot per episode of a batch.

    Raises ConfigError for a model that cannot play.
    """
    learner = load_learner(config, RunDir(config.run.root, config.run.name), ranks)
    begin(learner)
    tokenizer = load_tokenizer(Path(config.model.path), config.model)
    sampler = LockstepSampler(
        config.model.path,
        num_slots=config.replay.group_size * config.replay.groups_per_step,
        max_tokens=config.model.max_tokens,
        end_token=tokenizer.convert_tokens_to_ids(tokenizer.eos_token),
    )
    setup = StudySetup(config=config, sampler=sampler, tokenizer=tokenizer, runner=runner)
    snapshots = deque([snapshot(learner)], maxlen=lag + 1)
    return Practice(learner=learner, setup=setup, lag=lag, snapshots=snapshots)


def run(config: Config, *, lag: int, ranks: Ranks, change: Callable[[Learner], None] = lambda learner: None) -> Run:
    """Make `learner.steps` steps, and evaluate the last weights on `eval.num_tasks` held-out tasks.

    `change` may change the learner before the first step. It ends early when no group is useful any more.
    """
    success: list[float] = []
    steps: list[StepMetrics] = []
    with asyncio.Runner() as runner:
        practised = practice(config, lag=lag, ranks=ranks, runner=runner)
        change(practised.learner)
        with contextlib.suppress(NothingToLearn):
            while len(steps) < config.learner.steps:
                step = practised.step()
                success.append(step.success)
                steps.append(step.metrics)
        practised.setup.sampler.load(practised.snapshots[-1], practised.learner.progress.policy_version)
        solved = held_out(practised.setup, num_tasks=num_held_out(config))
    episodes = practised.learner.progress.next_group_id * config.replay.group_size
    return Run(success=success, steps=steps, held_out=solved, episodes=episodes)


def warm_start(config: Config, *, ranks: Ranks) -> Path:
    """The folder of the initial model of the runs of one seed. The first call makes it and imitates the expert."""
    run_dir = RunDir(config.run.root, config.run.name)
    if not run_dir.trained_model.exists():
        prepare(config)
        learner = load_learner(config, run_dir, ranks)
        for _ in imitate(
            learner.model,
            list(frame_file.read(run_dir.demonstrations, vocab_size=learner.model.vocab_size)),
            config=config.warm_start,
            ranks=ranks,
            seed=config.run.seed,
            micro_batch_tokens=config.learner.micro_batch_tokens,
        ):
            pass
        half = run_dir.path / "trained_model.tmp"
        save_hf(learner.model, half, ranks=ranks)
        half.rename(run_dir.trained_model)
    return run_dir.trained_model
