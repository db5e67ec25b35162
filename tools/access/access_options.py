"""The options of `slipstream access users` and `slipstream access join`: the fleet that a user is for."""

import re
from dataclasses import dataclass

from slipstream.common.process.config_error import ConfigError
from slipstream.replay.fleet.roles import Role
from slipstream.tools.terminal.options import check_options

FLEET = r"[A-Za-z0-9]{1,32}"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


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
    expires: str = ""  # how long the fleet's user is valid, such as 90m, 24h or 7d; empty: until it is revoked
    revoke: bool = False  # print the commands that remove the users and end their connections
    enforce: bool = False  # keep revoking the run's users whose time is over, on the server of redis.url

    def __post_init__(self) -> None:
        FleetOption.__post_init__(self)
        is_time = not self.expires or re.fullmatch("[1-9][0-9]{0,5}[smhd]", self.expires) is not None
        check_options(self, ("expires", is_time, "a number and s, m, h or d", "24h is a day"))
        if self.expires and (not self.fleet or self.revoke):
            raise ConfigError("--expires is for a new user of a fleet; give --fleet NAME, and leave out --revoke")
        if self.enforce and (self.fleet or self.revoke):
            raise ConfigError("--enforce revokes all users of the run whose time is over; give no other option")

    @property
    def lifetime_s(self) -> float:
        """The seconds of `expires`; 0 if it is empty."""
        return int(self.expires[:-1]) * UNITS_S[self.expires[-1]] if self.expires else 0
