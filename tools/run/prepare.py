"""Prepares a run: its directory, its tiny model, and the expert episodes of its warm start.

`python -m slipstream.tools.run.prepare CONFIG.yaml` does only that, in a process of its own: this module imports torch.
"""

import asyncio
import logging
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion
from slipstream.actors.episode.actions import ADMISSIBLE
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed, rollout
from slipstream.actors.group.episode_reward import Scoring, rewarded
from slipstream.common.config.config import Config, differences, dump_config, load_config
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.long_work import LongWork, report_on_stderr
from slipstream.common.process.output import whole_folder, write_whole
from slipstream.common.process.printable import printable_block
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records import frame_file
from slipstream.common.records.trajectory import Provenance, Sampling, Task, Trajectory, VersionSpan
from slipstream.common.text.action_format import PREDICTION, ActionFormat, format_of, predicts
from slipstream.common.text.chat import reply_form
from slipstream.common.text.codec import CONTEXT_TOKENS, decoder, encoder, following
from slipstream.common.text.pieces import check_tokenizer
from slipstream.common.text.tokenizer import load_tokenizer as tokenizer_of
from slipstream.envhub.catalogue import make_env, num_train_tasks
from slipstream.envhub.env import Env, EnvError
from slipstream.learner.supply.curriculum import Curriculum
from slipstream.tools.run.child import EXIT_BAD_INPUT
from slipstream.tools.run.tiny_model import make_tiny_model, shape_of

NUM_VOCABULARY_TASKS = 400  # train tasks whose text defines the tiny model's vocabulary
MAX_FAILED_SHARE = 0.25  # of the expert's tasks, whose environment may fail
MAX_PREDICTED_WORDS = 20  # of an expert's prediction: a reply has few tokens

WITHOUT_EXPERT = (
    "without one, begin with a model that can already play: set model.path=FOLDER and warm_start.episodes=0"
)

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    try:
        prepare(load_config(arguments[0], []))
    except ConfigError as error:
        print(printable_block(str(error)), file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def prepare(config: Config) -> RunDir:
    """Create what is missing in the run's directory. A resumed run continues with what exists."""
    run_dir = RunDir(config.run.root, config.run.name)
    run_dir.create()
    if run_dir.config.exists():
        for change in differences(load_config(str(run_dir.config), []), config):
            log.warning("the run continues with a changed setting: %s", change)
    write_whole(run_dir.config, dump_config(config))
    try:
        _make_what_is_missing(config, run_dir)
    except (EnvError, EpisodeFailed) as error:
        names = ", ".join(config.env.entries())
        raise ConfigError(f"`env.name` {names}: its expert failed to play: {error}; {WITHOUT_EXPERT}") from error
    return run_dir


def _make_what_is_missing(config: Config, run_dir: RunDir) -> None:
    if not config.model.path and not (run_dir.model / "config.json").exists():
        texts, max_tokens = vocabulary_texts(config.env, NUM_VOCABULARY_TASKS), config.model.max_tokens
        with whole_folder(run_dir.model) as folder:
            shape = shape_of(config.model.tiny_depth)
            make_tiny_model(folder, texts=texts, shape=shape, max_tokens=max_tokens, seed=config.run.seed)
    if config.warm_start.episodes and not run_dir.demonstrations.exists():
        tokenizer = load_tokenizer(model_folder(config, run_dir), config.model)
        frame_file.write(run_dir.demonstrations, demonstrate(config, tokenizer))


def model_folder(config: Config, run_dir: RunDir) -> Path:
    """The Hugging Face folder that the run begins with."""
    return Path(config.model.path) if config.model.path else run_dir.model


def load_tokenizer(folder: Path, model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. Raises ConfigError without one, or without a chat template that renders."""
    tokenizer = tokenizer_of(folder, model.template_arguments)
    if not tokenizer.chat_template:
        raise ConfigError(f"`model.path` {folder}: its tokenizer has no chat template; Slipstream trains chat models")
    check_tokenizer(tokenizer)
    return tokenizer


def vocabulary_texts(config: EnvConfig, num_tasks: int) -> set[str]:
    """Every observation and action of the expert in the first `num_tasks` train tasks. Raises EnvError."""
    try:
        return asyncio.run(_vocabulary_texts(config, num_tasks))
    except EnvError:
        raise
    except Exception as error:  # an environment's code may raise anything, as at the rollout boundary
        raise EnvError(f"{type(error).__name__}: {error}") from error


async def _vocabulary_texts(config: EnvConfig, num_tasks: int) -> set[str]:
    texts = {format_of(config).instructions, f"{ADMISSIBLE} ;" if config.show_admissible else ""}
    for label, part in config.entries().items():
        env = make_env(part.name, part.options)
        work = LongWork("tasks read for the vocabulary", num_tasks, report=report_on_stderr)
        for index in range(num_tasks):
            texts |= await _texts_of(env, Task(env=label, split="train", index=index), config)
            work.done()
        await env.close()
    return texts


async def _texts_of(env: Env, task: Task, config: EnvConfig) -> set[str]:
    """What an expert observes and may do in `task`, and the reply to a malformed action: a new policy gets it often."""
    written_as, texts = format_of(config), set[str]()
    observation = await env.reset(task)
    for _ in range(config.max_turns):
        texts.update(message.content for message in observation.messages)
        texts.update(written_as.write(action) for action in env.admissible() or ())
        action = env.expert()
        texts.add(written_as.write(action))
        observation = await env.step(action)
        if observation.done:
            break
    texts.update(message.content for message in observation.messages)
    await env.reset(task)
    refused = await env.step("?")
    return texts | {message.content for message in refused.messages}


class NoisyExpert:
    """Generates the actions of an environment's expert; with probability `noise`, a random admissible action."""

    def __init__(self, env: Env, tokenizer: PreTrainedTokenizerBase, action_format: ActionFormat, noise: float) -> None:
        self._env, self._tokenizer, self._format, self._noise = env, tokenizer, action_format, noise
        self._form = reply_form(tokenizer)

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """The tokens of the next action. Log-probabilities are 0, as nothing is sampled."""
        chance = random.Random(seed)
        choices = self._env.admissible()
        action = chance.choice(choices) if choices and chance.random() < self._noise else self._env.expert()
        written = self._form.write(await expert_reply(self._env, self._format, action))
        return completion_of(self._tokenizer, written, prompt=tokens)


async def expert_reply(env: Env, action_format: ActionFormat, action: str) -> str:
    """`action` in its format. Where that asks for a prediction, the first words of the true answer come before it.

    `env` tells the answer, and returns to its state. One that cannot return gives no prediction.
    """
    written = action_format.write(action)
    if not predicts(action_format) or env.replay_only:
        return written
    state = env.snapshot()
    observation = await env.step(action)
    env.restore(state)
    words = " ".join(message.content for message in observation.messages).split()
    return f"{PREDICTION.write(' '.join(words[:MAX_PREDICTED_WORDS]))} {written}"


def completion_of(tokenizer: PreTrainedTokenizerBase, text: str, *, prompt: list[int]) -> Completion:
    """`text` as if a policy had written it after `prompt`, with log-probabilities of 0."""
    tail = decoder(tokenizer)(prompt[-CONTEXT_TOKENS:])
    written = following(encoder(tokenizer), text, after=tail)
    return Completion(
        tokens=written,
        logprobs=[0.0] * len(written),
        kept=None,
        version_spans=[VersionSpan(start=0, stop=len(written), policy_version=0)],
        finish_reason="stop",
    )


def demonstrate(config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[Trajectory]:
    """Yield `warm_start.episodes` expert episodes on train tasks; where there are fewer tasks, they come again."""
    curriculum, num_tasks = Curriculum(config.env, seed=config.run.seed), num_train_tasks(config.env)
    labels = [curriculum.label(number) for number in range(config.warm_start.episodes)]
    tasks = {
        number: Task(env=label, split="train", index=number % num_tasks[label]) for number, label in enumerate(labels)
    }
    yield from expert_episodes(config, tokenizer, tasks, noise=config.warm_start.noise)


def expert_episodes(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[int, Task],
    *,
    noise: float,
    scoring: Scoring | None = None,
) -> Iterator[Trajectory]:
    """Yield an episode of each task, by group id, of an expert with `noise`.

    It is played by the same rollout as the actors use, and scored by `scoring`. A task on which the environment fails
    is left out and logged; if it fails on more than a quarter of them, its error is raised. Raises ConfigError for a
    format that no expert can write.
    """
    written_as = format_of(config.env)
    written_as.write("")
    envs = {label: make_env(part.name, part.options) for label, part in config.env.entries().items()}
    allowance = replace(Allowance.of(config), max_thought_tokens=0)  # an expert chooses
    work = LongWork("episodes of the expert", len(tasks), report=report_on_stderr)
    if allowance.model.context == "summary":  # an expert writes none
        allowance = replace(allowance, model=replace(allowance.model, context="stop"))
    with asyncio.Runner() as runner:
        try:
            num_failed = 0
            for group_id, task in tasks.items():
                record = EpisodeRecord(attempt=_demonstration(config, task, group_id=group_id))
                playing = rollout(
                    record,
                    env=envs[task.env],
                    sampler=NoisyExpert(envs[task.env], tokenizer, written_as, noise),
                    tokenizer=tokenizer,
                    action_format=written_as,
                    allowance=allowance,
                )
                try:
                    episode = runner.run(playing)
                except (EnvError, EpisodeFailed) as error:
                    num_failed += 1
                    if num_failed > MAX_FAILED_SHARE * len(tasks):
                        raise
                    log.warning("task %s is left out, its expert failed to play: %s", task.task_id, error)
                    continue
                work.done()
                yield runner.run(rewarded(episode, record, scoring=scoring))
        finally:
            for env in envs.values():
                runner.run(env.close())


def _demonstration(config: Config, task: Task, *, group_id: int) -> Attempt:
    return Attempt(
        run_id=config.run.name,
        task=task,
        group_id=group_id,
        actor="expert",
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=config.model.max_tokens),
        seed=config.run.seed * 1_000_003 + task.index,
        provenance=Provenance(host=socket.gethostname(), instance_kind="reserved", price_per_hour=0.0),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
