"""What a run's heartbeats say about its hosts: where they run, and how often they were taken away."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from slipstream.replay.fleet.fleet import Member, MemberState
from slipstream.tools.launch.market import Experience, Place

# A host was lost if the learner recorded a step in this time after its last heartbeat. If the learner recorded none,
# the run had been stopped, and all hosts left with it.
SOON_S, LATE_S = 60.0, 1800.0


def stays(member: Member) -> bool:
    """Whether `member` is an actor that is not draining."""
    return member.role == "actor" and member.state is not MemberState.DRAINING


def host_name(member: Member) -> str:
    """The supervisor that started an actor: an actor's name begins with it."""
    return member.name.rpartition("-")[0]


def place_of(member: Member) -> Place:
    return Place(member.instance_kind, member.zone)


def hosts_by_place(staying: Iterable[Member]) -> dict[Place, int]:
    """The number of hosts in each place."""
    names = defaultdict[Place, set[str]](set)
    for member in staying:
        names[place_of(member)].add(host_name(member))
    return {place: len(hosts) for place, hosts in names.items()}


def dollars_per_host(staying: Sequence[Member]) -> dict[Place, float]:
    """What a host of each place costs by its own actors' `actors.price_per_hour`, as a mean over its hosts."""
    dollars = defaultdict[Place, float](float)
    for member in staying:
        dollars[place_of(member)] += member.price_per_hour
    return {place: dollars[place] / count for place, count in hosts_by_place(staying).items()}


def experience(
    everyone: Iterable[Member], *, alive: Iterable[Member], step_times: Sequence[float], ended: Mapping[Place, int]
) -> dict[Place, Experience]:
    """Hours and losses by place: `everyone` has taken part, `alive` still do.

    `step_times` are the unix times of the steps; `ended` counts hosts that `slipstream scale` itself ended, which are
    no losses. A host that another person stopped counts as lost.
    """
    living = {host_name(member) for member in alive}
    hosts = defaultdict[tuple[Place, str], list[Member]](list)
    for member in everyone:
        if member.role == "actor":
            hosts[place_of(member), host_name(member)].append(member)
    hours, gone = defaultdict[Place, float](float), defaultdict[Place, list[float]](list)
    for (place, name), actors in hosts.items():
        last_s = max(actor.started_at_s + actor.served_s for actor in actors)
        hours[place] += (last_s - min(actor.started_at_s for actor in actors)) / 3600
        if name not in living and any(SOON_S < time_s - last_s <= LATE_S for time_s in step_times):
            gone[place].append(_lost_work_hours(actors, last_s))
    return {place: _experience(hours[place], gone[place], ended.get(place, 0)) for place in hours}


def _experience(host_hours: float, lost_work: Sequence[float], num_ended: int) -> Experience:
    num_lost = max(0, len(lost_work) - num_ended)
    mean = sum(lost_work) / len(lost_work) if lost_work else 0.0
    return Experience(num_lost=num_lost, host_hours=host_hours, lost_work_hours=num_lost * mean)


def _lost_work_hours(actors: Iterable[Member], last_s: float) -> float:
    """The hours that the actors which were there at the end had spent on tokens that were not kept, as a mean."""
    last = [actor for actor in actors if last_s - actor.started_at_s - actor.served_s < SOON_S]
    hours = [
        actor.served_s / 3600 * max(0, actor.generated_tokens - actor.kept_tokens) / max(actor.generated_tokens, 1)
        for actor in last
    ]
    return sum(hours) / len(hours)
