"""Exports the critic of a run as a reward model, from which a search reads the values of states."""

import dataclasses
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.reward_protocol import RETURN, RETURN_TO_GO, Kind
from slipstream.learner.checkpoint.checkpoint import agreed_checkpoint, load_critic, step_of
from slipstream.learner.credit.score import reads_turns
from slipstream.learner.model.packed_model import ModelSettings, load_kind
from slipstream.learner.model.reward_model import RewardModel, save_reward_model
from slipstream.learner.ranks.ranks import Ranks


def export_critic(config: Config, run_dir: RunDir, *, ranks: Ranks) -> Path:
    """Write the critic of the run's newest checkpoint to `run_dir.trained_critic`, and return that folder.

    Every rank calls it. Raises ConfigError if the run has no trained critic, or one that does not predict returns.
    """
    kind, is_shared = predicted(config.objective), config.objective.critic == "shared"
    newest = agreed_checkpoint(run_dir.checkpoints, ranks=ranks)
    if newest is None or step_of(newest) == 0:
        raise ConfigError(
            f"{run_dir.checkpoints} has no checkpoint of a critic that was trained; continue the run until it has "
            "written one (`learner.checkpoint_every`)"
        )
    settings = ModelSettings.of(config).frozen()
    if is_shared:  # the trunk is the policy's, which may have adapters
        settings = dataclasses.replace(settings, lora=config.model.lora)
    model = load_kind(RewardModel, config.model.path or run_dir.model, ranks=ranks, settings=settings)
    load_critic(newest, model, is_shared=is_shared, ranks=ranks)
    save_reward_model(model, run_dir.trained_critic, kind=kind, ranks=ranks)
    return run_dir.trained_critic


def predicted(objective: ObjectiveConfig) -> Kind:
    """What the critic of a run predicts in a state. Raises ConfigError if a search cannot use it.

    A search compares values with sums of the rewards that it sees, so the critic's target must be such a sum: of the
    turns to come if each turn's reward is at its own tokens, or of the whole episode if all are at its last token.
    """
    if objective.critic == "none":
        raise ConfigError(
            "the run trained no critic (`objective.critic=none`); train one with objective.advantage=gae and "
            "objective.critic=own or shared"
        )
    for is_other, key, value, why in (
        (objective.gamma != 1, "gamma", objective.gamma, "discounted returns"),
        (objective.turn_gamma != 1, "turn_gamma", objective.turn_gamma, "discounted returns"),
        (
            objective.kl_place == "reward" and objective.kl_coefficient > 0,
            "kl_place",
            objective.kl_place,
            "returns less their KL penalties",
        ),
        (objective.reward_model != "", "reward_model", objective.reward_model, "returns with that model's scores"),
    ):
        if is_other:
            raise ConfigError(
                f"the run's objective.{key} is {value}, so its critic predicts {why}, which a search cannot compare "
                "with the returns of its episodes; train a critic without that, or a model of `slipstream fit prm`"
            )
    return RETURN_TO_GO if reads_turns(objective) else RETURN
