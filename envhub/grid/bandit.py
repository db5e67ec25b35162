"""The bandit game: pull arms, see how much each pays, and keep the arm that pays most on average."""

import re
from dataclasses import dataclass, field

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.name_list import name_list
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction

ARMS = name_list(
    """
    amber, blue, coral, denim, ebony, fawn, green, hazel, ivory, jade, khaki, lime, mauve, navy, ochre, pink,
    quartz, red, sand, teal, umber, violet, white, yellow
    """
)
RULES = (
    "Each arm pays a random number of coins around its own mean. Find the arm that pays most on average: "
    "`pull NAME` as often as you like, then `keep NAME` once. Only the arm that you keep counts."
)
NUM_ARMS = 3
NUM_PAYS = 16  # the payouts of an arm repeat after this many pulls
GAP = 2  # coins, between the means of two arms
NOISE = 1  # coins, the largest distance of a payout from the mean
ENOUGH_PULLS = 2

_ACTION = re.compile(r"\s*(pull|keep)\s+(\w+)\s*", re.IGNORECASE)


class BanditState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The payouts seen so far, by arm. Their number determines the next payout."""

    pays: dict[str, tuple[int, ...]] = {}
    kept: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BanditWorld:
    opening: str
    arms: tuple[str, ...]
    pays: dict[str, tuple[int, ...]]  # the payouts of each arm, pull by pull
    best: str
    first: BanditState = field(default_factory=BanditState)

    async def act(self, state: BanditState, action: str) -> Change[BanditState]:
        found = _ACTION.fullmatch(action)
        if found is None or found[2].lower() not in self.arms:
            raise InvalidAction("no such arm")
        verb, arm = found[1].lower(), found[2].lower()
        if verb == "keep":
            kept = BanditState(pays=state.pays, kept=arm)
            return Change(state=kept, text=f"kept {arm}", over=True, score=float(arm == self.best))
        given = state.pays.get(arm, ())
        pay = self.pays[arm][len(given) % NUM_PAYS]
        # An arm that has shown all its payouts starts again: nothing new can be learned from it.
        pays = {**state.pays, arm: (*given, pay) if len(given) < NUM_PAYS else (pay,)}
        return Change(state=BanditState(pays=pays), text=f"{arm} {pay}")

    def admissible(self, state: BanditState) -> list[str]:
        return [f"{verb} {arm}" for verb in ("pull", "keep") for arm in self.arms]

    def expert(self, state: BanditState) -> str:
        """Pull each arm often enough, then keep the one that paid most. It uses only what a policy can see."""
        for arm in self.arms:
            if len(state.pays.get(arm, ())) < ENOUGH_PULLS:
                return f"pull {arm}"
        return f"keep {max(self.arms, key=lambda arm: sum(state.pays[arm]) / len(state.pays[arm]))}"


def make_bandit(task: Task) -> BanditWorld:
    rng = task_rng(task, world=f"grid/bandit/{NUM_ARMS}")
    arms = tuple(rng.sample(ARMS, NUM_ARMS))
    while split_of(_opening_text(arms)) != task.split:
        arms = tuple(rng.sample(ARMS, NUM_ARMS))
    means = [NOISE + GAP * rank for rank in range(NUM_ARMS)]
    rng.shuffle(means)
    pays = {
        arm: tuple(mean + rng.randint(-NOISE, NOISE) for _ in range(NUM_PAYS))
        for arm, mean in zip(arms, means, strict=True)
    }
    return BanditWorld(opening=_opening_text(arms), arms=arms, pays=pays, best=arms[means.index(max(means))])


def _opening_text(arms: tuple[str, ...]) -> str:
    return f"arms {' '.join(arms)}"
