"""What the actors of a run cost, and which tokens nobody learned from."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from replay.fleet import Member
from replay.ledger import Ledger


@dataclass(kw_only=True, slots=True)
class Share:
    """What the actors of one kind, zone and price have cost."""

    instance_kind: str
    zone: str
    price_per_hour: float  # dollars, of one
    num_actors: int = 0  # that ever served
    hours: float = 0.0  # of all together
    dollars: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of a run so far; the learner's own machines are not in it."""

    shares: list[Share]
    dollars_per_hour: float  # of those that serve now
    tokens_trained: int  # prompt and sampled, like those that were dropped
    wasted_tokens: dict[str, int]
    """By reason: of trajectories that were dropped, by the group's; of parts that were handed in and then discarded, by
    that; "preempted" are tokens that were sampled by actors that are gone, and are in neither of these."""

    @property
    def dollars(self) -> float:
        return sum(share.dollars for share in self.shares)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """None where nothing is trained yet, or nothing has a price."""
        return self.dollars / (self.tokens_trained / 1e6) if self.dollars and self.tokens_trained else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = {"dollars": self.dollars, "dollars_per_million_tokens": self.dollars_per_million_tokens}
        return totals | asdict(self)


def cost_of(everyone: Iterable[Member], *, alive: Iterable[Member], ledger: Ledger, tokens_trained: int) -> Cost:
    """`everyone` ever took part, and `alive` still do. A minute at 0.60 $ an hour costs a cent."""
    serving = {member.name for member in alive if member.role == "actor"}
    shares: dict[tuple[str, str, float], Share] = {}
    wasted: dict[str, int] = defaultdict(int)
    dollars_per_hour = 0.0
    for member in everyone:
        if member.role != "actor":
            continue
        what = (member.instance_kind, member.zone, member.price_per_hour)
        share = shares.setdefault(what, Share(instance_kind=what[0], zone=what[1], price_per_hour=what[2]))
        share.num_actors += 1
        share.hours += member.served_s / 3600
        share.dollars += member.price_per_hour * member.served_s / 3600
        if member.name in serving:
            dollars_per_hour += member.price_per_hour
        else:
            wasted["preempted"] += member.generated_tokens - member.kept_tokens
    for account, tokens in ledger.tokens.items():
        kind, _, reason = account.partition(":")
        if kind in ("dropped", "discarded"):
            wasted[reason] += tokens
    return Cost(
        shares=sorted(shares.values(), key=lambda share: -share.dollars),
        dollars_per_hour=dollars_per_hour,
        tokens_trained=tokens_trained,
        wasted_tokens={reason: tokens for reason, tokens in wasted.items() if tokens},
    )
