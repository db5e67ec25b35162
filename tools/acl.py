"""`slipstream acl`: print commands that create, or revoke, the users of a run on a shared Redis server."""

import secrets
import sys

from common.config import Config
from replay.roles import Role, acl_rules, user_of
from tools.acl_options import AclOptions


def acl(config: Config, *, options: AclOptions) -> int:
    """Print the commands for an administrator to send, and to stderr the name and new password of each user.

    With a fleet, there is one user, an actor's; otherwise one of each role.
    """
    run_id = config.run.name
    for role in [Role.ACTOR] if options.fleet else Role:
        user = user_of(run_id, role, fleet=options.fleet)
        if options.revoke:
            print("ACL DELUSER", user)  # Redis also closes the connections of this user
            continue
        password = secrets.token_hex(16)
        print("ACL SETUSER", user, *acl_rules(run_id, role, password=password))
        print(f"{role.value}: user {user}, password {password}", file=sys.stderr)
    return 0
