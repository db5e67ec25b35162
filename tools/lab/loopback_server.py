"""A run's own Redis server, for tests and measurements: on a port of loopback, with a user who may do anything."""

from pathlib import Path

from slipstream.replay.server import redis_server
from slipstream.replay.server.redis_server import made_private, start_mended
from slipstream.replay.server.server_settings import port_and_password, redis_url

ADMIN = "slipstream-admin"


class Server(redis_server.Server):
    """A server that listens on loopback."""

    @property
    def port(self) -> int:
        assert isinstance(self.address, int)
        return self.address

    @property
    def admin_url(self) -> str:
        """The URL of the user who may change the server's settings."""
        return redis_url(self.address, credentials=f"{ADMIN}:{self.password}@")


def start_server(directory: Path) -> Server:
    """Start a server with its data in `directory`; a restart keeps data, port and password. Raises ServerError."""
    config = made_private(directory) / "redis.conf"
    port, password = port_and_password(config)
    if f"user {ADMIN} " not in config.read_text():
        with config.open("a") as settings:
            settings.write(f"user {ADMIN} on >{password} ~* &* +@all\n")
    process = start_mended(config.parent, port).process
    return Server(directory=config.parent, address=port, password=password, process=process)
