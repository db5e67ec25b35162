"""A bandit: pull arms, see what they pay, and keep the one that pays best."""

import re
from dataclasses import dataclass

import msgspec

from common.message import Message
from common.trajectory import Task
from envhub.task_seed import split_of, task_rng
from envhub.world import Change

ARMS = ("amber", "blue", "coral", "denim", "ebony", "fawn", "green", "hazel", "ivory", "jade", "khaki", "lime", "mauve",
        "navy", "ochre", "pink", "quartz", "red", "sand", "teal", "umber", "violet", "white", "yellow")  # fmt: skip
RULES = (
    "Each arm pays by chance, one of them the most on average: whole coins around a middle of its own. Find out which: "
    "`pull NAME` as often as you like, then `keep NAME` once. Only what you keep counts."
)
NUM_PAYS = 16  # then an arm's pays begin again
GAP = 2  # coins between the middles of two arms
NOISE = 1  # coins at most, from the middle
ENOUGH_PULLS = 2

_ACTION = re.compile(r"\s*(pull|keep)\s+(\w+)\s*", re.IGNORECASE)


class BanditState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known: the pays that every arm has given. The next one follows from how many there were."""

    pays: dict[str, tuple[int, ...]]
    kept: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BanditWorld:
    arms: tuple[str, ...]
    profile: str
    pays: dict[str, tuple[int, ...]]  # what each arm will give, pull by pull
    best: str
    secrets: tuple[str, ...] = ()  # the best arm must be named among the others

    @property
    def opening(self) -> tuple[Message, ...]:
        system = (Message("system", RULES),) if self.profile == "full" else ()
        return (*system, Message("user", _opening_text(self.arms)))

    @property
    def first(self) -> BanditState:
        return BanditState(pays={})

    async def act(self, state: BanditState, action: str) -> Change[BanditState]:
        found = _ACTION.fullmatch(action)
        if found is None or found[2].lower() not in self.arms:
            return Change(state=state, text="no such arm", valid=False)
        verb, arm = found[1].lower(), found[2].lower()
        if verb == "keep":
            kept = BanditState(pays=state.pays, kept=arm)
            return Change(state=kept, text=f"kept {arm}", over=True, score=float(arm == self.best))
        given = state.pays.get(arm, ())
        pay = self.pays[arm][len(given) % NUM_PAYS]
        # Of an arm that has shown all its pays nothing new can be learned, and it starts again.
        pays = {**state.pays, arm: (*given, pay) if len(given) < NUM_PAYS else (pay,)}
        return Change(state=BanditState(pays=pays), text=f"{arm} {pay}")

    def admissible(self, state: BanditState) -> list[str]:
        return [f"{verb} {arm}" for verb in ("pull", "keep") for arm in self.arms]

    def expert(self, state: BanditState) -> str:
        """Pull every arm enough, then keep what paid most: it looks at nothing that a policy cannot see."""
        for arm in self.arms:
            if len(state.pays.get(arm, ())) < ENOUGH_PULLS:
                return f"pull {arm}"
        return f"keep {max(self.arms, key=lambda arm: sum(state.pays[arm]) / len(state.pays[arm]))}"


def make_bandit(task: Task, *, profile: str, num_arms: int) -> BanditWorld:
    """The arms of `task`. Raises ValueError for a split that does not exist."""
    rng = task_rng(task, world=f"grid/bandit/{num_arms}")
    arms = tuple(rng.sample(ARMS, num_arms))
    while split_of(_opening_text(arms)) != task.split:
        arms = tuple(rng.sample(ARMS, num_arms))
    middles = [NOISE + GAP * rank for rank in range(num_arms)]
    rng.shuffle(middles)
    pays = {
        arm: tuple(middle + rng.randint(-NOISE, NOISE) for _ in range(NUM_PAYS))
        for arm, middle in zip(arms, middles, strict=True)
    }
    return BanditWorld(arms=arms, profile=profile, pays=pays, best=arms[middles.index(max(middles))])


def _opening_text(arms: tuple[str, ...]) -> str:
    return f"arms {' '.join(arms)}"
