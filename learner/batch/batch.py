"""What one optimizer step trains on."""

import msgspec

from slipstream.replay.records.ticket import Group


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one optimizer step."""

    groups: list[Group]  # none if the tasks are solved: no group teaches anything
    num_dropped: dict[str, int]  # groups claimed for this step and dropped, by reason
    dropped_returns: list[float] = []  # of the members of these groups
    next_group_id: int  # of the next ticket to open
