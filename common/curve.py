"""Trust among those who move weights: CURVE, with one key pair for a run, which all of its processes hold.

A server shows whoever connects that it has the secret key, and lets in only who has it too. What travels is encrypted,
which costs 3 to 9 times the bare speed: a network that is trusted goes without.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.config_error import ConfigError

KEY_VARIABLE = "SLIPSTREAM_WEIGHTS_KEY"
DOMAIN = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveKey:
    """The run's key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    def guard_server(self, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]") -> "Gate":
        """Let only holders of the key into `socket`, which is not bound yet. Keep the gate, and close it at the end."""
        gate = Gate(self.public, context)
        socket.zap_domain = DOMAIN.encode()
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        return gate

    def guard_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Have `socket`, which is not connected yet, talk only to a holder of the key."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class Gate:
    """Asked by ZeroMQ, once for every connection, whether the key that it was made with may come in."""

    def __init__(self, public: bytes, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._public = public
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """The name is pyzmq's."""
        return key == self._public

    def close(self) -> None:
        """Idempotent."""
        self._authenticator.stop()


def new_secret() -> str:
    """The secret half of a new key. Raises ConfigError."""
    _check_curve()
    return zmq.curve_keypair()[1].decode()


def load_key(key_file: str) -> None:
    """Put the key in `key_file` where this process and its children find it. Raises ConfigError.

    What the environment holds already stands.
    """
    if key_file and not os.environ.get(KEY_VARIABLE):
        try:
            os.environ[KEY_VARIABLE] = Path(key_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"`weights.key_file` {key_file}: {error.strerror}; `slipstream key` makes one") from None
    key_from_environment()


def key_from_environment() -> CurveKey | None:
    """The run's key; None where it has none. Raises ConfigError."""
    secret = os.environ.get(KEY_VARIABLE, "").encode()
    if not secret:
        return None
    _check_curve()
    try:
        return CurveKey(public=zmq.curve_public(secret), secret=secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"{KEY_VARIABLE}, or the file `weights.key_file`, must hold 40 characters as `slipstream key` makes them; "
            f"got {len(secret)}, or characters that are none of its"
        ) from None


def _check_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this libzmq was built without CURVE, and weights are to travel under a key; install pyzmq's "
                          "own wheel, which has it")  # fmt: skip
