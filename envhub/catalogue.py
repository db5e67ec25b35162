"""The environments by name, and a user's own by `module:Class`."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from envhub.assets.agentbench_kg import make_agentbench_kg_env
from envhub.assets.agentbench_os import make_agentbench_os_env
from envhub.remote.agentgym_client import AgentGymClient
from envhub.assets.bird import make_bird_env
from envhub.adapters.browsergym import BrowserGymEnv
from envhub.code.code import make_code_env
from envhub.craft import make_craft_env
from envhub.assets.dbbench import make_dbbench_env
from envhub.env import Env
from envhub.remote.env_client import EnvClient
from envhub.assets.gaia import make_gaia_env
from envhub.grid.grid import make_grid_env
from envhub.adapters.gym import GymEnv
from envhub.household.household import HouseholdEnv
from envhub.kg.kg import make_kg_env
from envhub.adapters.mcp_tools import McpEnv
from envhub.adapters.miniwob import MiniWobEnv
from envhub.remote.openenv_client import OpenEnvClient
from envhub.adapters.reasoning import ReasoningEnv
from envhub.research.research import make_research_env
from envhub.shell.shell import make_shell_env
from envhub.shop.shop import ShopEnv
from envhub.sqldb.sqldb import make_sqldb_env
from envhub.swe.swe import make_swe_env
from envhub.assets.swebench import make_swebench_env
from envhub.adapters.textarena import TextArenaEnv
from envhub.assets.textcraft import make_textcraft_env
from envhub.adapters.textworld import TextWorldEnv
from envhub.tools.tools import make_tools_env
from envhub.adapters.verifiers_env import VerifiersEnv
from envhub.web.web import make_web_env
from envhub.assets.webshop import make_webshop_env

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
# To what others have made: each needs a package that only making it imports (docs/adapters.md).
ADAPTERS: dict[str, Callable[..., Env]] = {
    "browsergym": BrowserGymEnv,
    "gymnasium": GymEnv,
    "mcp": McpEnv,
    "miniwob": MiniWobEnv,
    "reasoning_gym": ReasoningEnv,
    "textarena": TextArenaEnv,
    "textworld": TextWorldEnv,
}

# The tasks of benchmarks, out of files that the user has (docs/assets.md).
ASSETS: dict[str, Callable[..., Env]] = {
    "agentbench_kg": make_agentbench_kg_env,
    "agentbench_os": make_agentbench_os_env,
    "bird": make_bird_env,
    "dbbench": make_dbbench_env,
    "gaia": make_gaia_env,
    "swebench": make_swebench_env,
    "textcraft": make_textcraft_env,
    "webshop": make_webshop_env,
}

# What is played over a wire, wherever it runs (docs/serving.md).
ELSEWHERE: dict[str, Callable[..., Env]] = {
    "remote": EnvClient,
    "openenv": OpenEnvClient,
    "agentgym": AgentGymClient,
}

# What plays its episodes by itself and asks for tokens (envhub/driving.py).
DRIVING: dict[str, Callable[..., VerifiersEnv]] = {"verifiers": VerifiersEnv}

Made = TypeVar("Made")

_MEMBERS = ("replay_only", "reset", "step", "close", "snapshot", "restore", "admissible", "state_key", "expert")


def env_maker(name: str) -> Callable[..., Env]:
    """What makes the environment of `env.name`: that of a key of one of these, or `module:Class`, which is imported.

    Raises ValueError for a name that is neither, a module or class that is not there, and a class that lacks a part of
    `Env`, with the list of what is missing.
    """
    if ":" in name:
        return _imported(name)
    if name in DRIVING:
        raise ValueError(
            f"`env.name` {name!r} plays its episodes by itself: it has no expert, and is not served to others"
        )
    known = ENVS | ADAPTERS | ASSETS | ELSEWHERE
    if name not in known:
        near = difflib.get_close_matches(name, [*known, *DRIVING], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? One of your own is module:Class" if near else "one of your own is module:Class"
        raise ValueError(f"`env.name` must be one of {', '.join([*known, *DRIVING])}, got {name!r}; {hint}")
    return known[name]


def make_env(name: str, options: Mapping[str, Any]) -> Env:
    """A new environment, `env_maker(name)(**options)`. Raises ValueError for a name or options that do not fit."""
    return _made(env_maker(name), name, options)


def make_any_env(name: str, options: Mapping[str, Any]) -> Env | VerifiersEnv:
    """As `make_env`, and of the kind that plays its episodes by itself as well."""
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
            f"`env.options` {dict(options)} do not fit {name}: {error}; its options are: {known}"
        ) from None
    return make(**options)


@functools.cache  # episodes are short, and each makes an environment
def _signature(make: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(make)


def _imported(name: str) -> type[Env]:
    module_name, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not class_name.isidentifier():
        raise ValueError(f"`env.name` must be module:Class, such as my_envs.maze:MazeEnv, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        is_itself = error.name is not None and module_name.startswith(error.name)
        hint = "is its folder on PYTHONPATH?" if is_itself else "it imports that itself"
        raise ValueError(f"`env.name` {name!r}: cannot import {module_name}: {error}; {hint}") from error
    members = vars(module)
    if class_name not in members:
        near = difflib.get_close_matches(class_name, members, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is not in {module.__file__}"
        raise ValueError(f"`env.name` {name!r}: {module_name} has no {class_name}; {hint}")
    kind = members[class_name]
    if not inspect.isclass(kind):
        raise ValueError(f"`env.name` {name!r}: {class_name} must be a class, got {type(kind).__name__}")
    _check_members(name, kind)
    return cast(type[Env], kind)


def _check_members(name: str, kind: type) -> None:
    """Raise ValueError unless `kind` defines every part of `Env`; what it inherits from `Env` itself does nothing."""
    defined = {member for base in kind.__mro__ if base is not Env for member in vars(base)}
    missing = [member for member in _MEMBERS if member not in defined]
    if missing:
        raise ValueError(
            f"`env.name` {name!r} lacks {', '.join(missing)} of envhub.env.Env; define them, or raise there"
        )
