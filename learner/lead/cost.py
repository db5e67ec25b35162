"""The cost of a run's actors, and the tokens that were generated but never trained on."""

from collections import defaultdict
from dataclasses import dataclass

from slipstream.replay.fleet.fleet import Census
from slipstream.replay.records.ledger import Ledger


@dataclass(kw_only=True, slots=True)
class ActorCost:
    """The cost so far of all actors of one kind and price."""

    instance_kind: str
    price_per_hour: float  # dollars, of one actor
    num_actors: int = 0  # that have ever served
    hours: float = 0.0  # summed over these actors
    dollars: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of a run so far, without the learner's own machines; a part of `summary.json`."""

    dollars: float
    dollars_per_million_tokens: float | None  # None if nothing has been trained yet, or if no actor has a price
    shares: list[ActorCost]
    dollars_per_hour: float  # of the actors that serve now
    spot_dollars_per_hour: float  # of those among them that are spot instances
    tokens_trained: int  # prompt and sampled tokens
    wasted_tokens: dict[str, int]
    """Prompt and sampled tokens that were not trained on, by reason. Dropped trajectories and discarded parts of
    episodes have the reason of the drop. "preempted" are tokens of actors that have left, without the other two."""


def cost_of(census: Census, *, ledger: Ledger, tokens_trained: int) -> Cost:
    """The cost of a run, of everyone in `census`. A minute at 0.60 $ an hour costs one cent."""
    serving = {member.name for member in census.alive}
    shares: dict[tuple[str, float], ActorCost] = {}
    wasted: dict[str, int] = defaultdict(int)
    dollars_per_hour, of_spot = 0.0, 0.0
    for member in census.everyone:
        what = (member.instance_kind, member.price_per_hour)
        share = shares.setdefault(what, ActorCost(instance_kind=what[0], price_per_hour=what[1]))
        share.num_actors += 1
        share.hours += member.served_s / 3600
        share.dollars += member.price_per_hour * member.served_s / 3600
        if member.name in serving:
            dollars_per_hour += member.price_per_hour
            of_spot += member.price_per_hour if member.instance_kind == "spot" else 0.0
        else:
            wasted["preempted"] += member.generated_tokens - member.kept_tokens
    for account, tokens in ledger.tokens.items():
        kind, _, reason = account.partition(":")
        if kind in ("dropped", "discarded"):
            wasted[reason] += tokens
    dollars = sum(share.dollars for share in shares.values())
    return Cost(
        dollars=dollars,
        dollars_per_million_tokens=dollars / (tokens_trained / 1e6) if dollars and tokens_trained else None,
        shares=sorted(shares.values(), key=lambda share: -share.dollars),
        dollars_per_hour=dollars_per_hour,
        spot_dollars_per_hour=of_spot,
        tokens_trained=tokens_trained,
        wasted_tokens={reason: tokens for reason, tokens in wasted.items() if tokens},
    )
