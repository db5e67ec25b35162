"""A model that does not change, on one engine here, without a run: what `slipstream eval` and `collect` play with."""

from pathlib import Path

from actors.act import make_stage
from actors.group import Stage
from actors.orders import engine_settings
from actors.receive import ReceiverInfo
from actors.vllm_engine import EngineProcess, VllmEngine
from common.config import Config
from common.config_error import ConfigError
from common.run_dir import RunDir
from tools.check_input import check_env, check_model_folder
from tools.prepare import load_tokenizer


def start_fixed_policy(config: Config, *, name: str) -> Stage:
    """What episodes are played with: the engine of `model.path`, else of the trained model of `run.name`.

    Whoever asks for it closes `engine`. Raises ConfigError where there is no such model, or no such environment.
    """
    folder = Path(config.model.path) if config.model.path else RunDir(config.run.root, config.run.name).trained_model
    if not folder.is_dir():
        raise ConfigError(f"no model at {folder}; give `model.path`, or `run.name` of a finished run")
    check_env(config.env)
    check_model_folder(folder, max_tokens=config.model.max_tokens)
    load_tokenizer(folder)
    settings = engine_settings(
        config,
        config.actors,
        model_path=str(folder),
        policy_version=0,
        seed=config.run.seed,
        receiver=ReceiverInfo(
            redis_url="", run_id=name, actor=name, transport="pull", chunk_bytes=1, timeout_s=1.0, disk=""
        ),  # nothing is ever offered to it
    )
    engine = VllmEngine(EngineProcess(), settings)
    return make_stage(engine, name=name, run=config, actors=config.actors, model_path=folder)
