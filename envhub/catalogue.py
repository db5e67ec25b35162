"""Makes environments by name: those listed here, and the user's own by `module:Class`.

Each is imported when the first of its kind is made: a process loads only what it plays.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from slipstream.common.config.config import Config
from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.process.imported import imported, is_own, loaded
from slipstream.envhub.driving import DrivingEnv
from slipstream.envhub.env import Env
from slipstream.envhub.name_list import name_list

NUM_TRAIN_TASKS = 100_000  # where their number is not known
NUM_HELD_OUT = 32  # twice that are about 2 % of the episodes between two evaluations
_signature = functools.cache(inspect.signature)  # each episode makes a new environment, and episodes are short

ENVS: dict[str, str] = {
    "shop": "slipstream.envhub.shop.shop:ShopEnv",
    "household": "slipstream.envhub.household.household:HouseholdEnv",
    "grid": "slipstream.envhub.grid.grid:make_grid_env",
    "craft": "slipstream.envhub.craft:make_craft_env",
    "kg": "slipstream.envhub.kg.kg:make_kg_env",
    "sqldb": "slipstream.envhub.sqldb.sqldb:make_sqldb_env",
    "web": "slipstream.envhub.web.web:make_web_env",
    "research": "slipstream.envhub.research.research:make_research_env",
    "tools": "slipstream.envhub.tools.tools:make_tools_env",
    "shell": "slipstream.envhub.shell.shell:make_shell_env",
    "code": "slipstream.envhub.code.code:make_code_env",
    "swe": "slipstream.envhub.swe.swe:make_swe_env",
}
# Environments of other packages. Making one imports its package (docs/adapters.md).
ADAPTERS: dict[str, str] = {
    "browsergym": "slipstream.envhub.adapters.browsergym:BrowserGymEnv",
    "gymnasium": "slipstream.envhub.adapters.gym:GymEnv",
    "mcp": "slipstream.envhub.adapters.mcp_tools:McpEnv",
    "reasoning_gym": "slipstream.envhub.adapters.reasoning:ReasoningEnv",
    "textarena": "slipstream.envhub.adapters.textarena:TextArenaEnv",
    "textworld": "slipstream.envhub.adapters.textworld:TextWorldEnv",
}

# Tasks from files that the user provides: benchmarks (docs/assets.md), and any questions (docs/dataset.md).
ASSETS: dict[str, str] = {
    "agentbench_kg": "slipstream.envhub.assets.agentbench_kg:make_agentbench_kg_env",
    "agentbench_os": "slipstream.envhub.assets.agentbench_os:make_agentbench_os_env",
    "bfcl": "slipstream.envhub.assets.bfcl:make_bfcl_env",
    "bird": "slipstream.envhub.assets.bird:make_bird_env",
    "dataset": "slipstream.envhub.dataset.dataset:make_dataset_env",
    "dbbench": "slipstream.envhub.assets.dbbench:make_dbbench_env",
    "gaia": "slipstream.envhub.assets.gaia:make_gaia_env",
    "swebench": "slipstream.envhub.assets.swebench:make_swebench_env",
    "textcraft": "slipstream.envhub.assets.textcraft:make_textcraft_env",
    "webshop": "slipstream.envhub.assets.webshop:make_webshop_env",
}

# Environments that run on a server (docs/serving.md).
REMOTE: dict[str, str] = {
    "remote": "slipstream.envhub.remote.env_client:EnvClient",
    "openenv": "slipstream.envhub.remote.openenv_client:OpenEnvClient",
    "agentgym": "slipstream.envhub.remote.agentgym_client:AgentGymClient",
}

# Environments that run the whole episode themselves and request tokens (envhub/driving.py).
DRIVING: dict[str, str] = {
    "agent": "slipstream.envhub.agent.agent:AgentEnv",
    "verifiers": "slipstream.envhub.adapters.verifiers_env:VerifiersEnv",
}

# Environments that have held-out tasks only if `env.options.held_out` names some. The others have a split of their own.
HELD_OUT_BY_OPTION = name_list(
    "agentbench_kg, agentbench_os, agentgym, bfcl, bird, dbbench, gaia, mcp, swebench, textworld"
)

COUNTED = ("agent", "dataset")  # their tasks may be the rows of a file, whose number is known

Made = TypeVar("Made")

# What an option of a built-in environment must be, by its annotation; whole numbers have ranges of their own.
_NOUNS: dict[Any, str] = {
    str: "a text",
    float: "a number of seconds above 0",
    Sequence[int]: "a list of whole numbers",
    str | Sequence[str]: "a text or a list of texts",
}
_NOUNS |= dict.fromkeys((Sequence[str], Sequence[str] | None), "a list of texts")
_NOUNS |= dict.fromkeys((Mapping[str, Any], Mapping[str, Any] | None), "a mapping")
_NOUNS[Mapping[str, str] | None] = "a mapping of texts to texts"
_SNAPSHOTS = {"snapshot", "restore"}
_OPTIONAL = _SNAPSHOTS | {"replay_only", "close", "admissible", "state_key", "expert"}


def without_held_out(entries: Mapping[str, MixtureEntry]) -> list[str]:
    """Return the labels of the environments whose options give them no held-out tasks."""
    return [label for label, entry in entries.items() if not _has_held_out(entry.name, entry.options)]


def num_held_out(config: Config) -> int:
    """The number of held-out tasks of each evaluation: never more than there are rows of files; 0 without any."""
    entries = config.env.entries()
    wanted = config.eval.num_tasks
    if wanted is None:
        wanted = 0 if without_held_out(entries) else NUM_HELD_OUT
    counted = [rows["held_out"] for entry in entries.values() if (rows := num_rows(entry))]
    return min([wanted, *(number * len(entries) for number in counted)])


def num_train_tasks(env: EnvConfig) -> dict[str, int]:
    """The number of train tasks of each environment, by its label."""
    return {
        label: env.num_train_tasks or num_rows(entry).get("train", NUM_TRAIN_TASKS)
        for label, entry in env.entries().items()
    }


def num_rows(entry: MixtureEntry) -> Mapping[str, int]:
    """The number of tasks by split, of an environment whose tasks are the rows of a file; empty for others.

    Raises ValueError if a file or an option is wrong.
    """
    env: Any = make_any_env(entry.name, entry.options) if entry.name in COUNTED else None
    return env.num_tasks if env else {}


def _has_held_out(name: str, options: Mapping[str, Any]) -> bool:
    if name == "remote":
        return _has_held_out(options.get("env", ""), options.get("options") or {})
    return name not in HELD_OUT_BY_OPTION or bool(options.get("held_out"))


def env_maker(name: str) -> Callable[..., Env]:
    """Return what makes the environment `name`: an entry of the tables above, or an imported `module:Class`.

    Raises ValueError if the name is unknown, the import fails, or the class lacks what has no default in `Env`.
    """
    if name in DRIVING:
        raise ValueError(
            f"`env.name` {name!r} runs whole episodes itself, so it has no expert and no server can offer it; "
            "name another environment here"
        )
    return _maker(name)


def make_env(name: str, options: Mapping[str, Any]) -> Env:
    """Return a new environment, `env_maker(name)(**options)`. Raises ValueError for an unknown name or bad options."""
    return _made(env_maker(name), name, options)


def make_any_env(name: str, options: Mapping[str, Any]) -> Env | DrivingEnv:
    """Like `make_env`, but also makes environments that run whole episodes themselves."""
    return cast(Env | DrivingEnv, _made(_maker(name), name, options))


def _maker(name: str) -> Callable[..., Any]:
    if is_own(name):
        return _imported(name)
    known = ENVS | ADAPTERS | ASSETS | REMOTE | DRIVING
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "check the spelling"
        raise ValueError(
            f"`env.name` must be one of {', '.join(known)}, or module:Class for your own environment, "
            f"got {name!r}; {hint}"
        )
    return loaded(known[name])


def _made(make: Callable[..., Made], name: str, options: Mapping[str, Any]) -> Made:
    signature = _signature(make)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise ValueError(
            f"`env.options` {dict(options)} are not valid for {name}: {error}; its options are: {known}"
        ) from None
    if not is_own(name):
        _check_types(signature, options)
    return make(**options)


def _check_types(signature: inspect.Signature, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of another type than its annotation. `server_command` may be null."""
    for name, value in options.items():
        if (kind := signature.parameters[name].annotation) not in _NOUNS or (name, value) == ("server_command", None):
            continue
        try:
            fits = kind is not float or 0 < msgspec.convert(value, float) < math.inf
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            fits = False
        if not fits:
            cure = "change it; in YAML, a text that is no word needs quotes"
            raise ValueError(f"`env.options.{name}` must be {_NOUNS[kind]}, got {value!r:.200}; {cure}")


def _imported(name: str) -> type[Env]:
    """Import a class, and give it the defaults of `Env` for what it lacks. Raises ValueError if there are none."""
    kind = imported("env.name", name, type)
    defaults = vars(Env)
    defined = {
        member for base in kind.__mro__ for member, value in vars(base).items() if defaults.get(member) is not value
    }
    needed = {"reset", "step"}
    if "replay_only" in defined and kind.replay_only is not True:
        needed |= _SNAPSHOTS
    if missing := sorted(needed - defined):
        raise ValueError(f"`env.name` {name!r} lacks {', '.join(missing)} of slipstream.envhub.env.Env; define each")
    if not hasattr(kind, "__getattr__"):  # one that hands on what it does not define
        for member in _OPTIONAL - defined:
            setattr(kind, member, defaults[member])
    return cast(type[Env], kind)
