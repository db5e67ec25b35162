"""The options of `slipstream acl` and `slipstream join-command`: the fleet that a user is for."""

import re
from dataclasses import dataclass

from common.config_error import require

FLEET = r"[A-Za-z0-9]{1,32}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOption:
    fleet: str = ""  # a name of your choice for some hosts: they get a user of their own, which can be revoked alone

    def __post_init__(self) -> None:
        require(
            not self.fleet or re.fullmatch(FLEET, self.fleet) is not None,
            "--fleet",
            "1 to 32 letters and digits",
            self.fleet,
            "choose another name",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AclOptions(FleetOption):
    revoke: bool = False  # print the commands that remove the users and end their connections
