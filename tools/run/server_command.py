"""Starts the servers of environments with a verb and ends them with it: `env.options.server_command`.

One server is for all actors of a run, as each of its episodes has an environment of its own there. A server that has
ended is not started again: the new one would count its environments from 0, so an actor could act in another's episode.
"""

import contextlib
import http.client
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from slipstream.common.config.config import Config
from slipstream.common.config.env_config import EnvConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.connection import is_listening
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Flag
from slipstream.tools.run.child import Child

# Runs the command, and ends all processes of its session when SIGTERM comes or the command has ended. The kernel sends
# SIGTERM when the verb is killed. A code of 2 would mean that a file of the user's is wrong.
GUARD = """
trap 'trap "" TERM; kill 0; (sleep 5; kill -9 0) & wait $server; kill -9 0' TERM
"$@" & server=$!
wait $server; code=$?
trap "" TERM; kill 0; exit $((code == 2 ? 1 : code))
"""
START_S = 600.0  # some load their data for minutes
ANSWER_S = 5.0
POLL_S = 0.2
GRACE_S = 10.0  # longer than the guard's


def server_commands(env: EnvConfig) -> dict[str, tuple[str, str]]:
    """The label and the URL of each server to start, by its command. Raises ConfigError."""
    found: dict[str, tuple[str, str]] = {}
    for label, part in env.entries().items():
        if command := part.options.get("server_command"):
            url = str(part.options.get("url", ""))
            try:
                place = urlsplit(url)
                is_right = bool(shlex.split(command) and place.scheme == "http" and place.hostname) and place.port != 0
            except (AttributeError, ValueError):
                is_right = False
            if not is_right:
                raise ConfigError(
                    f"`env.options.server_command` of {label} must be a command, and `env.options.url` the "
                    f"http://HOST:PORT at which its server listens, got {command!r} and {url!r}"
                )
            found.setdefault(command, (label, url))
    return found


@contextlib.contextmanager
def env_servers(config: Config, *, stop: Flag) -> Iterator[list[Child]]:
    """Start the servers of a run, and yield them when all have answered, or after `stop`. Raises ConfigError."""
    run_dir, servers = RunDir(config.run.root, config.run.name), dict[str, Child]()
    with contextlib.ExitStack() as stack:
        for command, (label, url) in server_commands(config.env).items():
            if is_listening(url):
                raise ConfigError(
                    f"`env.options.url` {url} is in use, so {command!r} cannot listen there; end what does, choose "
                    "another port in both, or set env.options.server_command= to play on what is there"
                )
            run_dir.create()
            words = ["sh", "-c", GUARD, "server", *shlex.split(command)]
            servers[url] = Child(f"server-{label}", words, log=run_dir.log(f"server-{label}"), environment={})
            stack.callback(servers[url].end, GRACE_S)
            servers[url].start()
        for url, server in servers.items():
            print(f"{server.name}: waiting until {url} answers; log: {server.log}", file=sys.stderr, flush=True)
            _wait_for_answer(url, server, stop)
        yield list(servers.values())


def ended(servers: Sequence[Child]) -> Child | None:
    """One that has ended, if any has."""
    return next((server for server in servers if server.exit_code is not None), None)


@contextlib.contextmanager
def playing_on_servers(config: Config) -> Iterator[None]:
    """Keep the servers of a verb that plays in this process. Raises ConfigError if one ends, which interrupts it."""
    with env_servers(config, stop=Flag()) as servers:
        if not servers:
            yield
            return
        over, main = Flag(), threading.main_thread().ident

        def watch() -> None:
            while not over.wait(POLL_S):
                if ended(servers) and main:
                    signal.pthread_kill(main, signal.SIGINT)
                    return

        before = signal.getsignal(signal.SIGINT)
        if before is signal.SIG_IGN:  # in the background of a shell
            signal.signal(signal.SIGINT, signal.default_int_handler)
        watching = threading.Thread(target=watch, name="servers", daemon=True)
        watching.start()
        try:
            yield
        except KeyboardInterrupt:
            if not ended(servers):
                raise
        finally:
            over.set()
            watching.join()
            signal.signal(signal.SIGINT, before)
        if server := ended(servers):
            raise ConfigError(_with_log(server, f"{server.ending} in the middle"))


def _wait_for_answer(url: str, server: Child, stop: Flag) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(url):
        if server.exit_code is not None:
            raise ConfigError(_with_log(server, f"{server.ending} before {url} answered"))
        if time.monotonic() > deadline:
            raise ConfigError(_with_log(server, f"has not answered at {url} for {START_S:g} s"))
        if stop.wait(POLL_S):
            return


def _with_log(server: Child, what: str) -> str:
    return f"{server.name} {what}; the last lines of {server.log}:\n{server.last_log_lines() or '(none)'}"


def _answers(url: str) -> bool:
    """Whether an HTTP server answers, with whatever status."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_S)
    try:
        connection.request("GET", place.path or "/")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
