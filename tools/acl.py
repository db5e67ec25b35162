"""`slipstream acl`: users for a run on a shared Redis server, one for each role, with new passwords."""

import secrets
import sys

from common.config import Config
from replay.roles import Role, acl_rules, user_of


def acl(config: Config) -> int:
    """Print commands that make the users, for an administrator to send; to stderr, what each role connects with."""
    run_id = config.run.name
    for role in Role:
        password, user = secrets.token_hex(16), user_of(run_id, role)
        print("ACL SETUSER", user, *acl_rules(run_id, role, password=password))
        print(f"{role.value}: user {user}, password {password}", file=sys.stderr)
    return 0
