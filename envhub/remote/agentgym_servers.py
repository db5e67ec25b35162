"""How the servers of AgentGym (https://github.com/WooooDyy/AgentGym) differ: all speak JSON over HTTP, and texts in it.

All have POST /create, /reset and /step, under the URL of the one environment that they serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentGymServer:
    id_key: str = "id"  # what an environment goes by in every body
    create_body: Mapping[str, object] = field(default_factory=dict)
    create_is_bare: bool = False  # /create answers the number alone
    index_key: str = "data_idx"  # of /reset: which task
    reset_body: Mapping[str, object] = field(default_factory=dict)  # beside it
    reset_answer: Literal["object", "text", "pair"] = (
        "object"  # with `observation` in it; the text; or the text and null
    )
    reset_tells: str = ""  # a further text of that object
    text_key: str = "observation"  # of what /step answers
    done_keys: tuple[str, ...] = ("done",)
    actions_key: str = ""  # a list of what makes sense next
    can_close: bool = False  # else it keeps for ever what was created there


_TOOL = AgentGymServer(
    id_key="env_idx", create_body={"id": 0}, create_is_bare=True, index_key="id", reset_answer="text"
)  # fmt: skip

SERVERS = {
    "webshop": AgentGymServer(
        id_key="env_idx", create_is_bare=True, index_key="session_id", reset_answer="pair", text_key="state"
    ),
    "alfworld": AgentGymServer(
        index_key="game", reset_body={"world_type": "Text"}, actions_key="available_actions"
    ),
    "babyai": AgentGymServer(can_close=True),
    "sciworld": AgentGymServer(reset_tells="task_description", can_close=True),
    "textcraft": AgentGymServer(can_close=True),
    "maze": AgentGymServer(index_key="game"),
    "wordle": AgentGymServer(index_key="seed"),
    "sqlgym": AgentGymServer(
        id_key="env_idx", create_is_bare=True, index_key="item_id", reset_answer="pair", text_key="state"
    ),
    "searchqa": AgentGymServer(
        id_key="env_idx", create_body={"id": 0}, create_is_bare=True, index_key="id", reset_answer="text",
        can_close=True,
    ),
    "weather": _TOOL,
    "movie": _TOOL,
    "todo": _TOOL,
    "academia": _TOOL,
    "sheet": _TOOL,
    "webarena": AgentGymServer(
        id_key="env_idx", index_key="idx", reset_body={"seed": 0}, done_keys=("terminated", "truncated"), can_close=True
    ),
}  # fmt: skip
