"""A judge's verdict on a whole group: what it adds to the rewards of the stored members."""

import msgspec

from slipstream.common.records.trajectory import MAX_REWARD, MAX_REWARDS, InvalidTrajectory, Trajectory


class Marks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the judged parts of `env.rewards` give one member, by the name of a part."""

    values: dict[str, float]  # what they measured, without weights
    rewards: dict[str, float]  # what they add to the last turn


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marks of every member, in the order of members; none if the judge could not read the group."""

    judge: str
    members: list[Marks]


def with_verdict(trajectories: list[Trajectory], verdict: Verdict) -> list[Trajectory]:
    """Return the members of a group with the judge's marks. Raises InvalidTrajectory if the verdict does not fit."""
    if len(verdict.members) != len(trajectories):
        raise InvalidTrajectory(f"the verdict has marks for {len(verdict.members)} of {len(trajectories)} members")
    return [_marked(trajectory, marks) for trajectory, marks in zip(trajectories, verdict.members, strict=True)]


def _marked(trajectory: Trajectory, marks: Marks) -> Trajectory:
    last = trajectory.turns[-1]
    for before, added in ((last.rewards, marks.rewards), (trajectory.part_values, marks.values)):
        if twice := before.keys() & added.keys():
            raise InvalidTrajectory(f"the verdict has {', '.join(sorted(twice))}, which the trajectory has already")
        if len(before) + len(added) > MAX_REWARDS:
            raise InvalidTrajectory(f"the verdict adds {len(added)} to {len(before)}, the limit is {MAX_REWARDS}")
        if not all(-MAX_REWARD <= number <= MAX_REWARD for number in added.values()):  # also false for NaN
            raise InvalidTrajectory(
                f"the verdict {added} contains a value that is not finite, or beyond {MAX_REWARD:g}"
            )
    return msgspec.structs.replace(
        trajectory,
        turns=[*trajectory.turns[:-1], msgspec.structs.replace(last, rewards={**last.rewards, **marks.rewards})],
        part_values={**trajectory.part_values, **marks.values},
        shown="",  # not needed any more, and archives stay small
    )
