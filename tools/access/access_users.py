"""`slipstream access users`: print commands that create, or revoke, the users of a run on a shared Redis server."""

import itertools
import secrets
import sys
from collections.abc import Sequence

from slipstream.common.config.config import Config, RunConfig
from slipstream.replay.fleet.roles import Role, acl_rules, user_of
from slipstream.tools.access.access_options import UsersOptions


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
