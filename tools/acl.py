"""`slipstream acl`: print commands that create one user per role for a run on a shared Redis server."""

import secrets
import sys

from common.config import Config
from replay.roles import Role, acl_rules, user_of


def acl(config: Config) -> int:
    """Print the commands for an administrator to send, and to stderr the user and new password of each role."""
    run_id = config.run.name
    for role in Role:
        password, user = secrets.token_hex(16), user_of(run_id, role)
        print("ACL SETUSER", user, *acl_rules(run_id, role, password=password))
        print(f"{role.value}: user {user}, password {password}", file=sys.stderr)
    return 0
