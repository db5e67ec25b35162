"""The correct functions that small repositories consist of, each with random arguments to call it.

Their source is copied into repositories. So each function is complete, and its docstring says all that it should do. It
has no `while`, because a bug in one could run for ever. It uses only built-in names and other functions of its table.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Draw = Callable[[random.Random], tuple[Any, ...]]


def mean(values: list[int]) -> float:
    """The mean of the values, rounded to two decimal places; 0 if there are none."""
    if len(values) == 0:
        return 0
    return round(sum(values) / len(values), 2)


def median(values: list[int]) -> float:
    """The middle value in sorted order; of an even number of values, the mean of the two middle ones."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: list[int]) -> int:
    """The largest value minus the smallest; 0 if there are none."""
    if not values:
        return 0
    return max(values) - min(values)


def clamp(value: int, low: int, high: int) -> int:
    """The value, limited to the range from low to high."""
    return max(low, min(value, high))


def count_above(values: list[int], bound: int) -> int:
    """How many values are larger than bound."""
    return sum(1 for value in values if value > bound)


def running_totals(values: list[int]) -> list[int]:
    """For each value, the sum of all values up to it, itself included."""
    totals = []
    total = 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def longest_run(values: list[int]) -> int:
    """The length of the longest sequence of equal values in a row."""
    longest = 0
    run = 0
    for position, value in enumerate(values):
        if position > 0 and value == values[position - 1]:
            run += 1
        else:
            run = 1
        longest = max(longest, run)
    return longest


def initials(name: str) -> str:
    """The first letter of each word, as capitals."""
    return "".join(word[0].upper() for word in name.split())


def shorten(text: str, width: int) -> str:
    """The text; if it is longer than width, its beginning and three dots, width characters in all."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def count_vowels(text: str) -> int:
    """How many letters are a, e, i, o or u, in lower or upper case."""
    return sum(1 for letter in text if letter.lower() in "aeiou")


def is_palindrome(text: str) -> bool:
    """Whether the letters read the same backwards; case and all other characters are ignored."""
    letters = [letter.lower() for letter in text if letter.isalpha()]
    return letters == letters[::-1]


def shifted(text: str, by: int) -> str:
    """The text with each lower-case letter moved forward in the alphabet, from z on to a; the rest stays."""
    signs = []
    for sign in text:
        if "a" <= sign <= "z":
            sign = chr((ord(sign) - 97 + by) % 26 + 97)
        signs.append(sign)
    return "".join(signs)


def longest_word(text: str) -> str:
    """The longest word; of several, the first."""
    best = ""
    for word in text.split():
        if len(word) > len(best):
            best = word
    return best


def discounted(price: int, percent: int) -> int:
    """The price minus percent % of it; the discount is rounded down."""
    return price - price * percent // 100


def split_bill(total: int, people: int) -> list[int]:
    """How much each person pays; if the total does not divide evenly, the first ones pay one more."""
    share = total // people
    rest = total % people
    return [share + 1 if person < rest else share for person in range(people)]


def coins(amount: int) -> list[int]:
    """How many coins of 50, 20, 10, 5, 2 and 1 make up the amount, as few as possible, in this order."""
    counts = []
    for coin in (50, 20, 10, 5, 2, 1):
        counts.append(amount // coin)
        amount = amount % coin
    return counts


def postage(weight: int) -> int:
    """85 for a weight of at most 20, 160 for at most 100, and 270 for more."""
    if weight <= 20:
        return 85
    if weight <= 100:
        return 160
    return 270


def cheapest(prices: dict[str, int]) -> str:
    """The name with the lowest price; of several, the first in the alphabet."""
    return min(sorted(prices), key=lambda name: prices[name])


def basket_total(prices: dict[str, int], percent: int) -> int:
    """The sum of all prices, each discounted by percent %."""
    return sum(discounted(price, percent) for price in prices.values())


def is_leap(year: int) -> bool:
    """Whether the year has 366 days: each year divisible by 4, but a multiple of 100 only if 400 divides it."""
    if year % 100 == 0:
        return year % 400 == 0
    return year % 4 == 0


def days_in_month(year: int, month: int) -> int:
    """How many days the month has; months are numbered from 1 for January to 12."""
    if month == 2:
        return 29 if is_leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def day_of_year(year: int, month: int, day: int) -> int:
    """The number of the day in its year, from 1 for the first of January."""
    return sum(days_in_month(year, earlier) for earlier in range(1, month)) + day


def minutes_between(start: str, end: str) -> int:
    """The minutes from start to end, such as 08:30; if end is earlier, it is on the next day."""
    hours = int(end[:2]) - int(start[:2])
    minutes = int(end[3:]) - int(start[3:])
    return (hours * 60 + minutes) % 1440


def clock(minutes: int) -> str:
    """The time so many minutes after midnight, such as 08:30; after a day it starts again at 00:00."""
    hours = minutes // 60 % 24
    rest = minutes % 60
    return f"{hours:02d}:{rest:02d}"


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """The columns as rows."""
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def diagonal(rows: list[list[int]]) -> list[int]:
    """The numbers on the diagonal from the upper left corner, as far as the rows are long enough."""
    return [row[place] for place, row in enumerate(rows) if place < len(row)]


def is_inside(row: int, column: int, height: int, width: int) -> bool:
    """Whether the row and the column, counted from 0, are in a grid of that height and width."""
    return row >= 0 and row < height and column >= 0 and column < width


def neighbours(row: int, column: int, size: int) -> list[tuple[int, int]]:
    """The places above, below, left and right that are in a square of that size."""
    places = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [place for place in places if is_inside(place[0], place[1], size, size)]


def walking_distance(start: list[int], end: list[int]) -> int:
    """The number of steps from start to end, along rows and columns."""
    return abs(start[0] - end[0]) + abs(start[1] - end[1])


@dataclass(frozen=True, slots=True)
class RepoFunction:
    function: Callable[..., Any]
    draw: Draw  # draws the arguments of a call
    uses: tuple[Callable[..., Any], ...] = ()  # the functions of the same file that it calls


_WORDS = ("amber", "level", "harbour", "kayak", "evening", "orange", "tea", "rhythm", "noon", "meadow", "zebra", "jazz")
_GOODS = ("bread", "cheese", "honey", "jam", "soap", "tea")


def _values(rng: random.Random) -> list[int]:
    return [rng.randrange(12) for _ in range(rng.randrange(1, 8))]


def _run(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randrange(3, 10))]


def _text(rng: random.Random) -> str:
    words = rng.sample(_WORDS, rng.randint(1, 4))
    return " ".join(word.capitalize() if rng.random() < 0.3 else word for word in words)


def _prices(rng: random.Random) -> dict[str, int]:
    return {name: rng.choice((20, 35, 50, 99)) for name in rng.sample(_GOODS, rng.randint(2, 4))}


def _year(rng: random.Random) -> int:
    return rng.choice((1900, 2000, 2023, 2024, 2100, 2400, rng.randrange(1901, 2100)))


def _time(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def _grid(rng: random.Random) -> list[list[int]]:
    width = rng.randint(1, 4)
    return [[rng.randrange(10) for _ in range(width)] for _ in range(rng.randint(1, 4))]


def _place(rng: random.Random) -> list[int]:
    return [rng.randrange(9), rng.randrange(9)]


FUNCTIONS: dict[str, tuple[RepoFunction, ...]] = {
    "numbers": (
        RepoFunction(mean, draw=lambda rng: (_values(rng)[rng.randint(0, 1) :],)),
        RepoFunction(median, draw=lambda rng: (_values(rng),)),
        RepoFunction(spread, draw=lambda rng: (_values(rng)[rng.randint(0, 1) :],)),
        RepoFunction(clamp, draw=lambda rng: (rng.randrange(-5, 15), rng.randrange(4), rng.randrange(5, 10))),
        RepoFunction(count_above, draw=lambda rng: (_values(rng), rng.randrange(12))),
        RepoFunction(running_totals, draw=lambda rng: (_values(rng),)),
        RepoFunction(longest_run, draw=lambda rng: (_run(rng),)),
    ),
    "texts": (
        RepoFunction(initials, draw=lambda rng: (_text(rng),)),
        RepoFunction(shorten, draw=lambda rng: (_text(rng), rng.randrange(5, 16))),
        RepoFunction(count_vowels, draw=lambda rng: (_text(rng),)),
        RepoFunction(is_palindrome, draw=lambda rng: (rng.choice([*_WORDS, "No on", "Never odd or even"]),)),
        RepoFunction(shifted, draw=lambda rng: (_text(rng), rng.randrange(1, 25))),
        RepoFunction(longest_word, draw=lambda rng: (_text(rng),)),
    ),
    "money": (
        RepoFunction(discounted, draw=lambda rng: (rng.randrange(10, 300), rng.randrange(0, 60, 5))),
        RepoFunction(split_bill, draw=lambda rng: (rng.randrange(10, 100), rng.randint(1, 5))),
        RepoFunction(coins, draw=lambda rng: (rng.randrange(1, 200),)),
        RepoFunction(postage, draw=lambda rng: (rng.choice((20, 21, 100, 101, rng.randrange(1, 200))),)),
        RepoFunction(cheapest, draw=lambda rng: (_prices(rng),)),
        RepoFunction(basket_total, draw=lambda rng: (_prices(rng), rng.randrange(0, 60, 5)), uses=(discounted,)),
    ),
    "dates": (
        RepoFunction(is_leap, draw=lambda rng: (_year(rng),)),
        RepoFunction(
            days_in_month, draw=lambda rng: (_year(rng), rng.choice((2, 2, rng.randint(1, 12)))), uses=(is_leap,)
        ),
        RepoFunction(
            day_of_year,
            draw=lambda rng: (_year(rng), rng.randint(1, 12), rng.randint(1, 28)),
            uses=(is_leap, days_in_month),
        ),
        RepoFunction(minutes_between, draw=lambda rng: (_time(rng), _time(rng))),
        RepoFunction(clock, draw=lambda rng: (rng.randrange(3000),)),
    ),
    "grids": (
        RepoFunction(transposed, draw=lambda rng: (_grid(rng),)),
        RepoFunction(diagonal, draw=lambda rng: (_grid(rng),)),
        RepoFunction(is_inside, draw=lambda rng: tuple(rng.randint(-1, 4) for _ in range(4))),
        RepoFunction(
            neighbours, draw=lambda rng: (rng.randrange(3), rng.randrange(3), rng.randint(1, 3)), uses=(is_inside,)
        ),
        RepoFunction(walking_distance, draw=lambda rng: (_place(rng), _place(rng))),
    ),
}
