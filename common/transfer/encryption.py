"""Authenticates and encrypts the transfer of weights: CURVE, with one key pair that all processes of a run have.

A server proves to each client that it has the secret key, and accepts only clients that have it too. The traffic is
encrypted, which makes it 3 to 9 times slower: leave the key out on a trusted network.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from slipstream.common.process.config_error import ConfigError

KEY_VARIABLE = "SLIPSTREAM_WEIGHTS_KEY"
DOMAIN = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveKey:
    """The run's key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    def guard_server(
        self, socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> ThreadAuthenticator:
        """Make `socket`, which is not bound yet, accept only clients with the key; the caller must stop the result."""
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, self)
        socket.zap_domain = DOMAIN.encode()
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client has the run's key: the authenticator's question, once for each connection."""
        return key == self.public

    def guard_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Make `socket`, which is not connected yet, connect only to servers with the key."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def new_secret() -> str:
    """Make a new key and return its secret half."""
    return zmq.curve_keypair()[1].decode()


def load_key(key_file: str) -> None:
    """Put the key in `key_file` into the environment of this process and its children. Raises ConfigError.

    A key that is in the environment already takes precedence.
    """
    if key_file and not os.environ.get(KEY_VARIABLE):
        try:
            secret = Path(key_file).read_text().strip()
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"`weights.key_file` {key_file} cannot be read: {why}; `slipstream access key` makes one"
            ) from None
        if not secret:  # it would be no key, and the weights open to all
            raise ConfigError(f"`weights.key_file` {key_file} is empty; `slipstream access key` makes one")
        os.environ[KEY_VARIABLE] = secret
    key_from_environment()


def key_from_environment() -> CurveKey | None:
    """The run's key; None if the environment has no key. Raises ConfigError."""
    secret = os.environb.get(KEY_VARIABLE.encode(), b"")
    if not secret:
        return None
    try:
        return CurveKey(public=zmq.curve_public(secret), secret=secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"{KEY_VARIABLE}, or the file `weights.key_file`, must contain the 40 characters that `slipstream access "
            f"key` makes; got {len(secret)} characters, or characters that are not in its alphabet"
        ) from None
