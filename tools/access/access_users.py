"""`slipstream access users`: print commands that create, or revoke, the users of a run on a shared Redis server."""

import itertools
import secrets
import sys
import time
from collections.abc import Sequence

import redis
from redis.exceptions import NoPermissionError

from slipstream.common.config.config import Config, RunConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import connect_or_explain
from slipstream.replay.fleet.roles import Role, acl_rules, user_of
from slipstream.replay.fleet.user_expiry import CHECK_EVERY_S, expiry_rules, revoke_expired
from slipstream.tools.access.access_options import UsersOptions


def users(config: Config, *, runs: Sequence[str], options: UsersOptions) -> int:
    """Print the commands for an administrator to send, and to stderr the name and new password of each user.

    With a fleet, there is one user of each run, an actor's; otherwise one of each role. With --enforce, revoke expired
    users. Raises ConfigError for what is no name of a run.
    """
    runs = [RunConfig(name=name).name for name in runs or [config.run.name]]  # a pattern would reach other runs
    if options.enforce:
        return _enforce(config, runs)
    expires_at_s = round(time.time() + options.lifetime_s)
    for run_id, role in itertools.product(runs, [Role.ACTOR] if options.fleet else Role):
        user = user_of(run_id, role, fleet=options.fleet)
        if options.revoke:
            print("ACL DELUSER", user)  # Redis also closes the connections of this user
            continue
        password = secrets.token_hex(16)
        date = expiry_rules(expires_at_s) if options.expires else []
        print("ACL SETUSER", user, *acl_rules(run_id, role, password=password), *date)
        print(f"{role.value}: user {user}, password {password}", file=sys.stderr)
        if date:
            print(
                f"it ends at {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(expires_at_s))}; a learner whose "
                "user may use ACL enforces that, or `slipstream access users --enforce`",
                file=sys.stderr,
            )
    return 0


def _enforce(config: Config, runs: Sequence[str]) -> int:
    """Revoke the users of the runs as their end dates pass, until a signal; print each one."""
    if not config.redis.url:
        raise ConfigError("`redis.url` is empty; give the server with an administrator's user, as redis://USER@HOST")
    client = connect_or_explain(config.redis.url)
    print(f"revoking users of {', '.join(runs)} whose end date has passed, every {CHECK_EVERY_S:.0f} s", flush=True)
    while True:
        for run_id in runs:
            try:
                for name in revoke_expired(client, run_id):
                    print(f"revoked {name}", flush=True)
            except NoPermissionError:
                raise ConfigError(
                    "the user of `redis.url` may not use ACL LIST and ACL DELUSER; give an administrator's"
                ) from None
            except redis.RedisError as error:
                print(f"could not revoke expired users; trying again in {CHECK_EVERY_S:.0f} s: {error}", flush=True)
        time.sleep(CHECK_EVERY_S)
