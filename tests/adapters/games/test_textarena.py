"""TextArena's games for one player, really played: `make test-adapters` installs TextArena and runs it."""

import re
from collections.abc import Callable

import pytest

from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import EnvError, Observation
from tests.adapters.held import ALWAYS, acted
from tests.envhub.env_cases import Case, task_of

pytestmark = pytest.mark.filterwarnings("ignore")  # TextArena's own

HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
CASES = [
    Case(name="textarena", max_turns=20, noisy_success=0, options={"game": "TowerOfHanoi-v0"}, samples=tuple(HANOI)),
    Case(name="textarena", max_turns=20, noisy_success=0, options={"game": "Minesweeper-v0"}, samples=("[0 0]",)),
]


@pytest.mark.parametrize("check", ALWAYS[:4] + ALWAYS[6:], ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_textarena_keeps_the_contract(
    case: Case, check: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.envhub.env_cases.offered", lambda env, case: list(case.samples))  # there are no experts
    check(case)


def played(game: str, actions: list[str]) -> list[Observation]:
    return acted("textarena", {"game": game}, 0, actions)


async def guessed(index: int) -> tuple[int, list[Observation]]:
    """Bisection, which needs five guesses of twenty numbers."""
    env, low, high = make_env("textarena", {"game": "GuessTheNumber-v0"}), 1, 20
    observations = [await env.reset(task_of("textarena", index))]
    while True:
        guess = (low + high) // 2
        observations.append(await env.step(f"I say [{guess}]"))
        if observations[-1].done:
            return guess, observations
        if "higher" in observations[-1].messages[0].content:
            low = guess + 1
        else:
            high = guess - 1


async def test_a_number_is_guessed_and_every_task_has_its_own() -> None:
    games = [await guessed(index) for index in range(12)]
    for _, observations in games:
        end = observations[-1]
        assert (end.terminated, end.success, end.score, end.rewards) == (True, True, 1.0, {"game": 1.0})
        assert all(observation.score == 0.0 for observation in observations[:-1])
    assert len({number for number, _ in games}) > 3
    assert await guessed(0) == games[0]


def test_only_what_is_new_is_said_and_not_the_players_own_words() -> None:
    opening, first, second = played("TowerOfHanoi-v0", HANOI[:2])
    assert "You are playing Tower of Hanoi with 3 disks" in opening.messages[0].content
    assert first.messages[0].content == "You moved disk 1 from A to C.\nCurrent Board: \nA: [3, 2]\nB: []\nC: [1]\n."
    assert second.messages[0].content == "You moved disk 2 from A to B.\nCurrent Board: \nA: [3]\nB: [2]\nC: [1]\n."
    end = played("TowerOfHanoi-v0", HANOI)[-1]
    assert (end.success, end.messages[0].content) == (True, "Congratulations! You solved the Tower of Hanoi puzzle.")


def test_what_is_not_understood_passes_once_and_then_ends_the_game() -> None:
    observations = played("TowerOfHanoi-v0", ["hello", "[A C]", "hello", "hello"])
    assert [o.valid_action for o in observations[1:]] == [False, True, False, False]
    assert [o.done for o in observations[1:]] == [False, False, False, True]
    assert observations[-1].score == 0.0


def test_a_reward_that_is_no_number_is_the_environments_failure() -> None:
    """Countdown of 0.7.4 hands over the reason in place of the reward, when a second invalid move ends it."""
    with pytest.raises(EnvError, match="as its reward, not a number"):
        played("Countdown-v0", ["hello", "hello"])


def test_a_game_that_one_player_cannot_play_is_refused_when_it_is_made() -> None:
    for game, why in (
        ("TicTacToe-v0", "number of players has to be 2"),
        ("Wordle-v0", "nltk.download"),
        ("ReverseTicTacToe-v0", "unmatched"),  # not Python before 3.12
        ("GuessTheNumbr-v0", re.escape("did you mean GuessTheNumber-v0")),
    ):
        with pytest.raises(ValueError, match=why):
            make_env("textarena", {"game": game})
