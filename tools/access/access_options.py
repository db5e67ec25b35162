"""The options of `slipstream access users` and `slipstream access join`: the fleet that a user is for."""

import re
from dataclasses import dataclass

from slipstream.replay.fleet.roles import Role
from slipstream.tools.terminal.options import check_options

FLEET = r"[A-Za-z0-9]{1,32}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOption:
    fleet: str = ""  # a name of your choice for some hosts: they get a user of their own, which can be revoked alone

    def __post_init__(self) -> None:
        roles = [role.value for role in Role]  # a fleet `learner` of run x would have the user of run x-actor's learner
        is_name = not self.fleet or (re.fullmatch(FLEET, self.fleet) is not None and self.fleet not in roles)
        names = f"1 to 32 letters and digits, and none of {', '.join(roles)}"
        check_options(self, ("fleet", is_name, names, "choose another name"))


@dataclass(frozen=True, kw_only=True, slots=True)
class UsersOptions(FleetOption):
    revoke: bool = False  # print the commands that remove the users and end their connections
