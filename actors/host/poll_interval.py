"""How often an actor asks Redis: more rarely in a large fleet, so that the requests of all actors stay bounded."""

from dataclasses import dataclass

ASKS_PER_S = 5000.0  # of one kind, by all actors together; docs/replay.md says what a server then has to answer
MAX_WAIT_S = 4.0


@dataclass(kw_only=True, slots=True)
class PollInterval:
    """The poll interval of one actor. Each kind of request asks it how long to wait."""

    num_members: int = 1  # processes of the run that were alive at this actor's last heartbeat

    def seconds(self, least_s: float, *, most_s: float = MAX_WAIT_S) -> float:
        """Seconds between two requests of one kind: `least_s`, unless all actors would exceed ASKS_PER_S.

        Never more than `most_s`: then a still larger fleet does exceed it.
        """
        return max(least_s, min(most_s, self.num_members / ASKS_PER_S))
