"""The JSON formats of AgentGym's servers (https://github.com/WooooDyy/AgentGym), which differ in their field names.

All have POST /create, /reset and /step, under the URL of the one environment that they serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentGymServer:
    """The fields of one server's requests and replies."""

    id_key: str = "id"  # the environment's number, in every request
    create_body: Mapping[str, object] = field(default_factory=dict)
    create_is_bare: bool = False  # /create replies with the number alone
    index_key: str = "data_idx"  # the task's number, in /reset
    reset_body: Mapping[str, object] = field(default_factory=dict)  # further fields of /reset
    # An object with `observation`; the text; or the text and null.
    reset_answer: Literal["object", "text", "pair"] = "object"
    reset_text: str = ""  # a further text of that object, shown before `observation`
    text_key: str = "observation"  # the text in /step's reply
    done_keys: tuple[str, ...] = ("done",)
    actions_key: str = ""  # the list of sensible next actions
    can_close: bool = False  # if not, the server keeps every environment forever


_TOOL = AgentGymServer(
    id_key="env_idx", create_body={"id": 0}, create_is_bare=True, index_key="id", reset_answer="text"
)
_PAIR = AgentGymServer(id_key="env_idx", create_is_bare=True, reset_answer="pair", text_key="state")

SERVERS = {
    "webshop": replace(_PAIR, index_key="session_id"),
    "alfworld": AgentGymServer(index_key="game", reset_body={"world_type": "Text"}, actions_key="available_actions"),
    "babyai": AgentGymServer(can_close=True),
    "sciworld": AgentGymServer(reset_text="task_description", can_close=True),
    "textcraft": AgentGymServer(can_close=True),
    "maze": AgentGymServer(index_key="game"),
    "wordle": AgentGymServer(index_key="seed"),
    "sqlgym": replace(_PAIR, index_key="item_id"),
    "searchqa": replace(_TOOL, can_close=True),
    **dict.fromkeys(("weather", "movie", "todo", "academia", "sheet"), _TOOL),
    "webarena": AgentGymServer(
        id_key="env_idx", index_key="idx", reset_body={"seed": 0}, done_keys=("terminated", "truncated"), can_close=True
    ),
}
