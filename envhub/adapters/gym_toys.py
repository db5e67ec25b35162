"""The `Speech` of Gymnasium's toy-text environments: FrozenLake, Taxi, CliffWalking, Blackjack.

All but Blackjack are finite and publish their transitions, so value iteration gives them an optimal expert.
"""

import weakref
from collections.abc import Callable
from typing import Any

from slipstream.envhub.gym_speech import Ending, Moment, Speech

LAKE_WAYS = ("left", "down", "right", "up")  # Gymnasium's number of an action is its position here
CLIFF_WAYS = ("up", "right", "down", "left")
TAXI_WAYS = ("south", "north", "east", "west", "pick up", "drop off")
BLACKJACK_WAYS = ("stick", "hit")
TAXI_PLACES = ("red", "green", "yellow", "blue")
DISCOUNT = 0.99
MAX_CHANGE = 1e-9  # value iteration stops when no value changes by more

_values: weakref.WeakKeyDictionary[Any, dict[int, float]] = weakref.WeakKeyDictionary()


def parse_way(ways: tuple[str, ...]) -> Callable[[Moment, str], int | None]:
    """Return a parser from the names in `ways`, in any case and with any white space, to their positions."""

    def parse(_: Moment, action: str) -> int | None:
        words = " ".join(action.lower().split())
        return ways.index(words) if words in ways else None

    return parse


def _show_lake(moment: Moment) -> str:
    rows = [[cell.decode() for cell in row] for row in moment.env.desc]
    row, column = divmod(int(moment.observation), len(rows[0]))
    standing_on, rows[row][column] = rows[row][column], "P"
    ends = {"H": "\nyou fell into a hole", "G": "\nyou are at the goal"}
    return "\n".join("".join(cells) for cells in rows) + ends.get(standing_on, "")


def _show_cliff(moment: Moment) -> str:
    rows = [["."] * 12 for _ in range(4)]
    rows[3] = ["S", *"C" * 10, "G"]
    row, column = divmod(int(moment.observation), 12)
    rows[row][column] = "P"
    return "\n".join("".join(cells) for cells in rows)


def _show_taxi(moment: Moment) -> str:
    row, column, passenger, destination = moment.env.decode(int(moment.observation))
    lines = [[cell.decode() for cell in line] for line in moment.env.desc]
    lines[1 + row][2 * column + 1] = "T"
    where = "in the taxi" if passenger == len(TAXI_PLACES) else f"at {TAXI_PLACES[passenger]}"
    passenger_line = f"the passenger is {where} and wants to go to {TAXI_PLACES[destination]}"
    return "\n".join(["".join(line) for line in lines] + [passenger_line])


def _taxi_actions(moment: Moment) -> list[str]:
    return [way for way, changes in zip(TAXI_WAYS, moment.info["action_mask"], strict=True) if changes]


def _show_blackjack(moment: Moment) -> str:
    total, dealer, has_ace = moment.observation
    shown = "an ace" if dealer == 1 else str(dealer)
    ace = ", with an ace that counts 11" if has_ace else ""
    return f"your cards make {total}{ace}; the dealer shows {shown}"


def _play_blackjack(moment: Moment) -> str:
    total, dealer, has_ace = moment.observation
    enough = 18 if has_ace else 17 if dealer in (1, 7, 8, 9, 10) else 13
    return "stick" if total >= enough else "hit"


def _best_way(ways: tuple[str, ...]) -> Callable[[Moment], str]:
    def best(moment: Moment) -> str:
        values, outcomes = _values_of(moment.env), moment.env.P[int(moment.observation)]
        number: int = max(outcomes, key=lambda action: _worth(outcomes[action], values))
        return ways[number]

    return best


def _values_of(env: Any) -> dict[int, float]:
    """Return the discounted return of the best policy from each state, by value iteration."""
    if env in _values:
        return _values[env]
    values, changed = dict.fromkeys(env.P, 0.0), True
    while changed:
        changed = False
        for state, outcomes in env.P.items():
            value = max(_worth(outcome, values) for outcome in outcomes.values())
            changed |= abs(value - values[state]) > MAX_CHANGE
            values[state] = value
    _values[env] = values
    return values


def _worth(outcome: list[tuple[float, int, float, bool]], values: dict[int, float]) -> float:
    """Return the sum over outcomes of p * (r + 0.99 * value of the next state, 0 at the end)."""
    return sum(p * (reward + (0.0 if ends else DISCOUNT * values[then])) for p, then, reward, ends in outcome)


def _key(moment: Moment) -> str:
    return str(moment.observation)


def _arrived(ending: Ending) -> float:
    return float(ending.terminated)


def _won(ending: Ending) -> float:
    """Return 0 for a loss, 0.5 for a draw, 1 for a win (the rewards are -1, 0 and 1, or 1.5 for a natural)."""
    return min(1.0, (ending.last_reward + 1) / 2)


LAKE = Speech(
    rules="You stand on P on a frozen lake; F is ice, S the start, H a hole, G the goal. Go to the goal, and into no "
    "hole. The ice may be slippery. Say left, right, up or down.",
    show=_show_lake,
    parse=parse_way(LAKE_WAYS),
    score=lambda ending: float(ending.last_reward > 0),
    actions=lambda moment: list(LAKE_WAYS),
    key=_key,
    expert=_best_way(LAKE_WAYS),
)
CLIFF = Speech(
    rules="You stand on P. Go to G; whoever steps on the cliff C is back at S. Say left, right, up or down.",
    show=_show_cliff,
    parse=parse_way(CLIFF_WAYS),
    score=_arrived,
    actions=lambda moment: list(CLIFF_WAYS),
    key=_key,
    expert=_best_way(CLIFF_WAYS),
)
TAXI = Speech(
    rules="You drive the taxi T. R, G, Y and B are the places red, green, yellow and blue; | is a wall. Fetch the "
    "passenger and bring them where they want to go. Say north, south, east, west, pick up or drop off.",
    show=_show_taxi,
    parse=parse_way(TAXI_WAYS),
    score=_arrived,
    actions=_taxi_actions,
    key=_key,
    expert=_best_way(TAXI_WAYS),
)
BLACKJACK = Speech(
    rules="Blackjack: come nearer to 21 than the dealer, and not above it. Say hit for another card, or stick.",
    show=_show_blackjack,
    parse=parse_way(BLACKJACK_WAYS),
    score=_won,
    actions=lambda moment: list(BLACKJACK_WAYS),
    expert=_play_blackjack,  # no key: the next cards are hidden
)
TOYS = {
    "FrozenLake-v1": LAKE,
    "FrozenLake8x8-v1": LAKE,
    "CliffWalking-v1": CLIFF,
    "CliffWalkingSlippery-v1": CLIFF,
    "Taxi-v4": TAXI,
    "Blackjack-v1": BLACKJACK,
}
