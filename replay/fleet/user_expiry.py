"""The end dates of Redis users, and who enforces them: Redis has none.

A user's date is in its own record, as a channel that it may use: `&slipstream:expires:UNIX_TIME`. It has no command for
channels, so it gets no right by it, and only an administrator can change it.
"""

import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from slipstream.replay.fleet.roles import Role, user_of

LABEL = "&slipstream:expires:"
CHECK_EVERY_S = 10.0

log = logging.getLogger(__name__)


def expiry_rules(expires_at_s: int) -> list[str]:
    """The rules that give a user an end date, for `ACL SETUSER`."""
    return ["resetchannels", f"{LABEL}{expires_at_s}"]


def revoke_expired(client: redis.Redis, run_id: str) -> list[str]:
    """Remove the run's users whose end date has passed by the server's clock, which closes their connections.

    Return their names. A date that cannot be read counts as passed. Raises NoPermissionError, RedisAway.
    """
    lines: Any = client.acl_list()
    now: Any = client.time()
    revoked = list(_expired(lines, run_id, now[0]))
    for name in revoked:
        client.acl_deluser(name)
    return revoked


def _expired(lines: list[str], run_id: str, now_s: int) -> Iterator[str]:
    roles = "|".join(re.escape(user_of(run_id, role)) for role in Role)
    for line in lines:
        _, name, *rules = line.split()
        dates = [rule.removeprefix(LABEL) for rule in rules if rule.startswith(LABEL)]
        is_passed = any(not re.fullmatch("[0-9]{1,12}", date) or int(date) <= now_s for date in dates)
        if is_passed and re.fullmatch(rf"({roles})(-[A-Za-z0-9]+)?", name):
            yield name


class Revoker:
    """Revokes a run's expired users on one server, with a thread, until it is closed."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        """Begin. The thread ends at once if this user may not use ACL: then `access users --enforce` must do it."""
        self._client = client
        self._run_id = run_id
        self._closing = threading.Event()
        threading.Thread(target=self._keep, name="revoke-expired", daemon=True).start()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closing.set()

    def _keep(self) -> None:
        while True:
            try:
                for name in revoke_expired(self._client, self._run_id):
                    log.info("the end date of the Redis user %s has passed: revoked", name)
            except NoPermissionError:
                return
            except redis.RedisError as error:
                log.warning("could not revoke expired users; trying again in %.0f s: %s", CHECK_EVERY_S, error)
            if self._closing.wait(CHECK_EVERY_S):
                return
