"""Stand-ins for actors and a learner. The caller starts their Redis server."""

import json
import signal
import sys
from pathlib import Path

import msgspec
import redis

from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.lab.soak.accounts import Accounts, compare
from slipstream.tools.lab.soak.actor import Acknowledged, Work, read_journal
from slipstream.tools.run.child import Child

END_TIMEOUT_S = 60.0


class Cast:
    """Real processes that can be killed and restarted one by one; their files are in `directory`."""

    def __init__(self, directory: Path, work: Work, *, password: str) -> None:
        """`work.url` is the URL of the server, or of a proxy to it, without the password."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._environment = {"OMP_NUM_THREADS": "1", PASSWORD_VARIABLE: password}
        self.work = work
        self.learner = self.stand_in("learner")
        self.actors = [self.stand_in(f"actor-{number}") for number in range(2)]

    @property
    def everyone(self) -> list[Child]:
        return [self.learner, *self.actors]

    @property
    def journals(self) -> list[Path]:
        """The journals of the actors that have inserted something."""
        return sorted(self._directory.glob("actor-*.jsonl"))

    def stand_in(self, name: str) -> Child:
        """Make, but do not start, a learner if `name` begins with learner, else an actor.

        Two stand-ins of one name share their file.
        """
        role = "learner" if name.startswith("learner") else "actor"
        file = "learner" if role == "learner" else name
        journal = str(self._directory / f"{file}.jsonl")
        work = msgspec.structs.replace(self.work, name=name, journal=journal)
        return Child(
            name,
            [sys.executable, "-P", "-m", f"slipstream.tools.lab.soak.{role}", json.dumps(msgspec.to_builtins(work))],
            log=self._directory / f"{name}.log",
            environment=self._environment,
        )

    def start(self) -> None:
        for child in self.everyone:
            child.start()

    def answers(self) -> list[Acknowledged]:
        """The answers to the actors' inserts so far; the list grows while they work."""
        return [line for journal in self.journals for line in read_journal(journal)]

    def end(self) -> list[str]:
        """End all processes, the learner first; return those that did not exit in order."""
        wrong = []
        for child in self.everyone:
            if child.exit_code is None:
                child.send(signal.SIGCONT)
                child.end(END_TIMEOUT_S)
            if child.exit_code not in (EXIT_PREEMPTED, -signal.SIGTERM):  # SIGTERM: it had just been started
                wrong.append(f"{child.name} ended with code {child.exit_code}: {child.last_log_lines()}")
        return wrong

    def kill(self) -> None:
        for child in self.everyone:
            child.kill()

    def accounts(self, client: redis.Redis) -> Accounts:
        """Compare everything acknowledged and trained with the ledger; all processes must have ended."""
        return compare(client, self.work.run_id, journals=self.journals, steps=self._directory / "learner.jsonl")
