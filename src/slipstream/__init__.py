"""Asynchronous reinforcement learning of LLM agents.

What an environment, a reward, an agent or an objective of one's own needs is here. A name is imported at its first
use, so that this module costs nothing, and imports neither torch nor vLLM.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.common.config.config import Config, load_config
    from slipstream.common.records.message import Message
    from slipstream.common.records.tool_call import ToolCall
    from slipstream.common.records.trajectory import Task, Trajectory, Turn
    from slipstream.common.text.action_format import ParsedAction
    from slipstream.envhub.catalogue import make_env, num_train_tasks
    from slipstream.envhub.env import Env, EnvError, Observation
    from slipstream.envhub.rewards.episode import Episode
    from slipstream.learner.objective.correction import Correction
    from slipstream.learner.objective.loss_tokens import LossTokens
    from slipstream.learner.objective.ratio import ratio
    from slipstream.learner.objective.surrogate import Surrogate
    from slipstream.learner.step.loss import policy_loss
    from slipstream.tools.cli.python_api import train

__all__ = [
    "Config",
    "Correction",
    "Env",
    "EnvError",
    "Episode",
    "LossTokens",
    "Message",
    "Observation",
    "ParsedAction",
    "Surrogate",
    "Task",
    "ToolCall",
    "Trajectory",
    "Turn",
    "load_config",
    "make_env",
    "num_train_tasks",
    "policy_loss",
    "ratio",
    "train",
]

_PLACES = {
    "Config": "slipstream.common.config.config",
    "Correction": "slipstream.learner.objective.correction",
    "Env": "slipstream.envhub.env",
    "EnvError": "slipstream.envhub.env",
    "Episode": "slipstream.envhub.rewards.episode",
    "LossTokens": "slipstream.learner.objective.loss_tokens",
    "Message": "slipstream.common.records.message",
    "Observation": "slipstream.envhub.env",
    "ParsedAction": "slipstream.common.text.action_format",
    "Surrogate": "slipstream.learner.objective.surrogate",
    "Task": "slipstream.common.records.trajectory",
    "ToolCall": "slipstream.common.records.tool_call",
    "Trajectory": "slipstream.common.records.trajectory",
    "Turn": "slipstream.common.records.trajectory",
    "load_config": "slipstream.common.config.config",
    "make_env": "slipstream.envhub.catalogue",
    "num_train_tasks": "slipstream.envhub.catalogue",
    "policy_loss": "slipstream.learner.step.loss",
    "ratio": "slipstream.learner.objective.ratio",
    "train": "slipstream.tools.cli.python_api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
