"""Makes environments by name: those listed here, and the user's own by `module:Class`."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from common.config import Config
from common.env_config import MixtureEntry
from common.imported import imported, is_own
from envhub.adapters.browsergym import BrowserGymEnv
from envhub.adapters.gym import GymEnv
from envhub.adapters.mcp_tools import McpEnv
from envhub.adapters.miniwob import MiniWobEnv
from envhub.adapters.reasoning import ReasoningEnv
from envhub.adapters.textarena import TextArenaEnv
from envhub.adapters.textworld import TextWorldEnv
from envhub.adapters.verifiers_env import VerifiersEnv
from envhub.agent.agent import AgentEnv
from envhub.assets.agentbench_kg import make_agentbench_kg_env
from envhub.assets.agentbench_os import make_agentbench_os_env
from envhub.assets.bird import make_bird_env
from envhub.assets.dbbench import make_dbbench_env
from envhub.assets.gaia import make_gaia_env
from envhub.assets.swebench import make_swebench_env
from envhub.assets.textcraft import make_textcraft_env
from envhub.assets.webshop import make_webshop_env
from envhub.code.code import make_code_env
from envhub.craft import make_craft_env
from envhub.dataset.dataset import make_dataset_env
from envhub.driving import DrivingEnv
from envhub.env import Env
from envhub.grid.grid import make_grid_env
from envhub.household.household import HouseholdEnv
from envhub.kg.kg import make_kg_env
from envhub.remote.agentgym_client import AgentGymClient
from envhub.remote.env_client import EnvClient
from envhub.remote.openenv_client import OpenEnvClient
from envhub.research.research import make_research_env
from envhub.shell.shell import make_shell_env
from envhub.shop.shop import ShopEnv
from envhub.sqldb.sqldb import make_sqldb_env
from envhub.swe.swe import make_swe_env
from envhub.tools.tools import make_tools_env
from envhub.web.web import make_web_env

NUM_HELD_OUT = 32  # twice that are about 2 % of the episodes between two evaluations

ENVS: dict[str, Callable[..., Env]] = {
    "shop": ShopEnv,
    "household": HouseholdEnv,
    "grid": make_grid_env,
    "craft": make_craft_env,
    "kg": make_kg_env,
    "sqldb": make_sqldb_env,
    "web": make_web_env,
    "research": make_research_env,
    "tools": make_tools_env,
    "shell": make_shell_env,
    "code": make_code_env,
    "swe": make_swe_env,
}
# Environments of other packages. Making one imports its package (docs/adapters.md).
ADAPTERS: dict[str, Callable[..., Env]] = {
    "browsergym": BrowserGymEnv,
    "gymnasium": GymEnv,
    "mcp": McpEnv,
    "miniwob": MiniWobEnv,
    "reasoning_gym": ReasoningEnv,
    "textarena": TextArenaEnv,
    "textworld": TextWorldEnv,
}

# Tasks from files that the user provides: benchmarks (docs/assets.md), and any questions (docs/dataset.md).
ASSETS: dict[str, Callable[..., Env]] = {
    "agentbench_kg": make_agentbench_kg_env,
    "agentbench_os": make_agentbench_os_env,
    "bird": make_bird_env,
    "dataset": make_dataset_env,
    "dbbench": make_dbbench_env,
    "gaia": make_gaia_env,
    "swebench": make_swebench_env,
    "textcraft": make_textcraft_env,
    "webshop": make_webshop_env,
}

# Environments that run on a server (docs/serving.md).
REMOTE: dict[str, Callable[..., Env]] = {
    "remote": EnvClient,
    "openenv": OpenEnvClient,
    "agentgym": AgentGymClient,
}

# Environments that run the whole episode themselves and request tokens (envhub/driving.py).
DRIVING: dict[str, Callable[..., DrivingEnv]] = {"agent": AgentEnv, "verifiers": VerifiersEnv}

# Environments that have held-out tasks only if `env.options.held_out` names some. The others have a split of their own.
HELD_OUT_BY_OPTION = (
    "agentbench_kg",
    "agentbench_os",
    "agentgym",
    "bird",
    "dbbench",
    "gaia",
    "mcp",
    "swebench",
    "textworld",
)

Made = TypeVar("Made")

_MEMBERS = ("replay_only", "reset", "step", "close", "snapshot", "restore", "admissible", "state_key", "expert")


def without_held_out(entries: Mapping[str, MixtureEntry]) -> list[str]:
    """Return the labels of the environments whose options give them no held-out tasks."""
    return [label for label, entry in entries.items() if not _has_held_out(entry.name, entry.options)]


def num_held_out(config: Config) -> int:
    """The number of held-out tasks of each evaluation; 0 if the run has none."""
    if config.eval.num_tasks is not None:
        return config.eval.num_tasks
    return 0 if without_held_out(config.env.entries()) else NUM_HELD_OUT


def _has_held_out(name: str, options: Mapping[str, Any]) -> bool:
    if name == "remote":
        return _has_held_out(options.get("env", ""), options.get("options") or {})
    return name not in HELD_OUT_BY_OPTION or bool(options.get("held_out"))


def env_maker(name: str) -> Callable[..., Env]:
    """Return what makes the environment `name`: an entry of the tables above, or an imported `module:Class`.

    Raises ValueError if the name is unknown, the import fails, or the class lacks members of `Env`; it lists those.
    """
    if is_own(name):
        return _imported(name)
    if name in DRIVING:
        raise ValueError(
            f"`env.name` {name!r} runs whole episodes itself, so it has no expert and no server can offer it; "
            "name another environment here"
        )
    known = ENVS | ADAPTERS | ASSETS | REMOTE
    if name not in known:
        near = difflib.get_close_matches(name, [*known, *DRIVING], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "check the spelling"
        raise ValueError(
            f"`env.name` must be one of {', '.join([*known, *DRIVING])}, or module:Class for your own environment, "
            f"got {name!r}; {hint}"
        )
    return known[name]


def make_env(name: str, options: Mapping[str, Any]) -> Env:
    """Return a new environment, `env_maker(name)(**options)`. Raises ValueError for an unknown name or bad options."""
    return _made(env_maker(name), name, options)


def make_any_env(name: str, options: Mapping[str, Any]) -> Env | DrivingEnv:
    """Like `make_env`, but also makes environments that run whole episodes themselves."""
    if name in DRIVING:
        return _made(DRIVING[name], name, options)
    return make_env(name, options)


def _made(make: Callable[..., Made], name: str, options: Mapping[str, Any]) -> Made:
    signature = _signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ValueError(
            f"`env.options` {dict(options)} are not valid for {name}: {error}; its options are: {known}"
        ) from None
    return make(**options)


@functools.cache  # each episode makes a new environment, and episodes are short
def _signature(make: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(make)


def _imported(name: str) -> type[Env]:
    kind = imported("env.name", name, type)
    _check_members(name, kind)
    return cast(type[Env], kind)


def _check_members(name: str, kind: type) -> None:
    """Raise ValueError unless `kind` defines every member of `Env`. Members inherited from `Env` itself are empty."""
    defined = {member for base in kind.__mro__ if base is not Env for member in vars(base)}
    missing = [member for member in _MEMBERS if member not in defined]
    if missing:
        raise ValueError(
            f"`env.name` {name!r} lacks {', '.join(missing)} of envhub.env.Env; define each, "
            "or let it raise NotImplementedError"
        )
