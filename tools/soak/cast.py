"""The processes of a soak: stand-ins for actors and a learner, on a server that somebody else starts."""

import json
import signal
import sys
from pathlib import Path

import msgspec
import redis

from common.connection import PASSWORD_VARIABLE
from common.shutdown import EXIT_PREEMPTED
from replay.buffer import Buffer
from tools.child import Child
from tools.soak.accounts import Accounts, compare
from tools.soak.actor import Acknowledged, Work, make_buffer, read_journal

END_TIMEOUT_S = 60.0


class Cast:
    """Real processes that may be killed and started again one by one; their files live in `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        url: str,
        password: str,
        run_id: str,
        num_actors: int = 2,
        lease_ttl_s: float = 3.0,
        episode_s: float = 0.005,
        num_tokens: int = 256,
        checkpoint_every: int = 5,
        seed: int = 0,
    ) -> None:
        """`url` is that of the server, or of a proxy before it, without the password."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._environment = {"OMP_NUM_THREADS": "1", PASSWORD_VARIABLE: password}
        self._work = Work(
            url=url,
            run_id=run_id,
            name="",
            journal="",
            lease_ttl_s=lease_ttl_s,
            episode_s=episode_s,
            num_tokens=num_tokens,
            checkpoint_every=checkpoint_every,
            seed=seed,
        )
        self.learner = self.stand_in("learner")
        self.actors = [self.stand_in(f"actor-{number}") for number in range(num_actors)]

    @property
    def everyone(self) -> list[Child]:
        return [self.learner, *self.actors]

    @property
    def journals(self) -> list[Path]:
        """Of the actors that have inserted something."""
        return sorted(self._directory.glob("actor-*.jsonl"))

    def stand_in(self, name: str) -> Child:
        """An actor or, if it is named so, a learner, not started yet. Two of one name share their file."""
        role = "learner" if name.startswith("learner") else "actor"
        file = "learner" if role == "learner" else name
        work = msgspec.structs.replace(self._work, name=name, journal=str(self._directory / f"{file}.jsonl"))
        return Child(
            name,
            [sys.executable, "-m", f"tools.soak_{role}", json.dumps(msgspec.to_builtins(work))],
            log=self._directory / f"{name}.log",
            environment=self._environment,
        )

    def buffer(self, client: redis.Redis) -> Buffer:
        """The same buffer, for whoever looks on or takes part."""
        return make_buffer(client, self._work)

    def start(self) -> None:
        for child in self.everyone:
            child.start()

    def answers(self) -> list[Acknowledged]:
        """What the actors were told by inserts so far; it grows while all is well."""
        return [line for journal in self.journals for line in read_journal(journal)]

    def end(self) -> list[str]:
        """Ask everyone to end, the learner first; what they did not do in order."""
        wrong = []
        for child in self.everyone:
            if child.exit_code is None:
                child.send(signal.SIGCONT)
                child.ask_to_end()
                child.wait(END_TIMEOUT_S)
            if child.exit_code != EXIT_PREEMPTED:
                wrong.append(f"{child.name} ended with {child.exit_code}: {child.last_words()}")
        return wrong

    def kill(self) -> None:
        """End everyone at once."""
        for child in self.everyone:
            child.kill()

    def accounts(self, client: redis.Redis) -> Accounts:
        """Everything that was acknowledged and trained against the books; everyone must have ended."""
        return compare(client, self._work.run_id, journals=self.journals, steps=self._directory / "learner.jsonl")
