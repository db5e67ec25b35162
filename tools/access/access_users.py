"""`slipstream access users`: print commands that create, or revoke, the users of a run on a shared Redis server."""

import itertools
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.common.config.config import Config, RunConfig
from slipstream.replay.fleet.roles import Role, acl_rules, user_of
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


def users(config: Config, *, runs: Sequence[str], options: UsersOptions) -> int:
    """Print the commands for an administrator to send, and to stderr the name and new password of each user.

    With a fleet, there is one user of each run, an actor's; otherwise one of each role. Raises ConfigError for
    what is no name of a run.
    """
    runs = [RunConfig(name=name).name for name in runs or [config.run.name]]  # a pattern would reach other runs
    for run_id, role in itertools.product(runs, [Role.ACTOR] if options.fleet else Role):
        user = user_of(run_id, role, fleet=options.fleet)
        if options.revoke:
            print("ACL DELUSER", user)  # Redis also closes the connections of this user
            continue
        password = secrets.token_hex(16)
        print("ACL SETUSER", user, *acl_rules(run_id, role, password=password))
        print(f"{role.value}: user {user}, password {password}", file=sys.stderr)
    return 0
