"""The games of `grid`: the effect of a move, when a board is lost, and the payouts of a bandit."""

import asyncio
import random

from slipstream.envhub.grid.bandit import make_bandit
from slipstream.envhub.grid.board import BoardState, BoardWorld, _moved, distances_of, make_board
from slipstream.envhub.grid.grid import make_grid_env
from tests.envhub.env_cases import act, task_of


def board(text: str, size: int, state: BoardState) -> BoardWorld:
    distances = distances_of(text, {}, state, [-size, size, -1, 1])
    return BoardWorld(size=size, cells=text, slips={}, first=state, distances=distances)


def test_a_box_is_pushed_onto_its_target_and_that_wins() -> None:
    world = board("#######___T#######", 6, BoardState(you=7, boxes=(8,)))
    first = act(world, "right")
    assert (first.state, first.over) == (BoardState(you=8, boxes=(9,)), False)
    assert first.text == "# # # # # #\n# _ P X T #\n# # # # # #"
    second = act(world, "right", first.state)
    assert (second.state, second.over, second.score) == (BoardState(you=9, boxes=(10,)), True, 1.0)
    assert second.text == "# # # # # #\n# _ _ P V #\n# # # # # #"


def test_a_box_at_a_wall_stays_and_a_box_that_can_never_reach_a_target_loses() -> None:
    world = board("#######T___##____#######", 6, BoardState(you=8, boxes=(9,)))
    lost = act(world, "right")  # into the corner
    assert (lost.state, lost.over, lost.score) == (BoardState(you=9, boxes=(10,)), True, 0.0)
    stuck = board("#####TP##_X##_T#####", 4, BoardState(you=6, boxes=(10,)))
    pushed = act(stuck, "down")
    assert pushed.score == 1.0
    corner = BoardState(you=10, boxes=(14,))
    assert _moved(stuck.cells, {}, corner, 4) == corner


def test_a_hole_ends_the_episode_with_score_0() -> None:
    env = make_grid_env(game="frozen_lake", size=6)
    falls = 0
    for index in range(40):
        asyncio.run(env.reset(task_of("grid", index)))
        rng = random.Random(index)
        for _ in range(60):
            observation = asyncio.run(env.step(rng.choice(["up", "down", "left", "right"])))
            if observation.done:
                falls += not observation.success
                assert observation.score in (0.0, 1.0)
                assert (" P" in observation.messages[0].content) or ("P " in observation.messages[0].content)
                break
    assert falls > 10


def test_ice_slips_the_same_way_every_time() -> None:
    task = task_of("grid", 1)
    lakes = [make_board(task, game="frozen_lake", size=8) for _ in range(2)]
    assert lakes[0].slips == lakes[1].slips != {}
    assert make_board(task, game="maze", size=8).slips == {}


def test_a_bandits_best_arm_pays_most_on_average_and_keeping_it_wins() -> None:
    for index in range(20):
        bandit = make_bandit(task_of("grid", index))
        averages = {arm: sum(pays) / len(pays) for arm, pays in bandit.pays.items()}
        assert max(averages, key=averages.__getitem__) == bandit.best
        kept = {arm: act(bandit, f"keep {arm}") for arm in bandit.arms}
        assert {arm for arm, change in kept.items() if change.score == 1.0} == {bandit.best}
        assert all(change.over for change in kept.values())


def test_a_bandit_pays_in_a_fixed_order_and_starts_again_after_the_last_payout() -> None:
    bandit = make_bandit(task_of("grid", 0))
    arm, state, paid = bandit.arms[0], bandit.first, []
    for _ in range(17):
        change = act(bandit, f"pull {arm}", state)
        state = change.state
        paid.append(int(change.text.split()[1]))
    assert tuple(paid) == (*bandit.pays[arm], bandit.pays[arm][0])
