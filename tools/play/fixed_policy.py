"""Starts an engine with a fixed model on this machine, without a run, for `slipstream eval` and `collect`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.episode.episode_record import Attempt
from slipstream.actors.group.group import EpisodeSetup
from slipstream.actors.host.act import make_setup
from slipstream.actors.host.rehearse import check_template
from slipstream.actors.weights.receive import ReceiverInfo
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.tools.run.check_input import check_env, check_model_folder
from slipstream.tools.run.model_export import finish_command
from slipstream.tools.run.prepare import load_tokenizer


def fixed_model_folder(config: Config) -> Path:
    """`model.path` if given, else the trained model of `run.name`. Raises ConfigError if it does not exist."""
    run_dir = RunDir(config.run.root, config.run.name)
    folder = Path(config.model.path) if config.model.path else run_dir.trained_model
    if not folder.is_dir():
        ends = "" if config.model.path else finish_command(run_dir)
        cure = f"`{ends}` writes it" if ends else "give `model.path`, or `run.name` of a finished run"
        raise ConfigError(f"no model at {folder}; {cure}")
    return folder


def fixed_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the fixed model, for episodes that another plays. Raises ConfigError as `start_fixed_policy`."""
    folder = fixed_model_folder(config)
    check_env(config.env)
    check_model_folder(folder, max_tokens=config.model.max_tokens)
    return load_tokenizer(folder, config.model)


def attempt_at(
    config: Config, setup: EpisodeSetup, task: Task, sampling: Sampling, *, group_id: int, member: int = 0
) -> Attempt:
    """The identity of an episode that is played without a run."""
    return Attempt(
        run_id=setup.run_id,
        task=task,
        group_id=group_id,
        member=member,
        actor=setup.actor,
        sampling=sampling,
        seed=config.run.seed,
        provenance=setup.provenance,
    )


def start_fixed_policy(config: Config, *, name: str, formats: Sequence[str] = ()) -> EpisodeSetup:
    """Start an engine with `model.path` if given, else with the trained model of `run.name`.

    Every one of `formats`, by default `env.action_format`, is tried on the chat template before that.

    The caller closes `engine`. Raises ConfigError if the model or the environment does not exist, or vLLM refuses.
    """
    folder = fixed_model_folder(config)
    check_model_folder(folder, max_tokens=config.model.max_tokens)
    tokenizer = load_tokenizer(folder, config.model)
    for action_format in formats or (config.env.action_format,):
        env = dataclasses.replace(config.env, action_format=action_format)
        check_env(env)
        check_template(dataclasses.replace(config, env=env), tokenizer)
    settings = EngineSettings(
        model=config.model,
        actors=config.actors,
        model_path=str(folder),
        policy_version=0,
        seed=config.run.seed,
        # It never receives weights.
        receiver=ReceiverInfo(redis_url="", run_id=name, actor=name, transport="pull", timeout_s=1.0),
    )
    try:
        engine = VllmEngine(EngineProcess(), settings)
    except ValueError as error:
        cure = "if its KV cache is too small, raise `actors.kv_cache_bytes`, or lower `model.max_tokens`"
        raise ConfigError(f"the engine refused its settings; {cure}: {error}") from error
    return make_setup(engine, name=name, run=config, actors=config.actors, tokenizer=tokenizer)
