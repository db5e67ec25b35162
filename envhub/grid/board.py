"""Games on a board of cells: push boxes onto targets, cross a frozen lake, find the way through a maze.

Boards are drawn until one can be solved. The distance of each state to the goal is computed. The expert always moves
to a state with a smaller distance. A state without a distance (in a hole, a box in a corner) is lost: the episode ends.
"""

import random
from collections import deque
from dataclasses import dataclass

import msgspec

from slipstream.common.records.trajectory import Task
from slipstream.envhub.task_seed import split_of, task_rng
from slipstream.envhub.world import Change, InvalidAction

WALL, FLOOR, HOLE, GOAL, TARGET, BOX, YOU = "#", "_", "O", "G", "T", "X", "P"
BOX_ON_TARGET, YOU_ON_TARGET = "V", "S"


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    obstacle: str
    density: float  # the share of the board that obstacles cover
    slips: float = 0.0  # the share of moves that go in another direction, always the same one
    rules: str


GAMES = {
    "sokoban": Game(
        obstacle=WALL,
        density=0.15,
        rules="Push every box X onto a target T; you are P (S on a target), # is a wall, V a box on a target. Boxes "
        "can be pushed but not pulled, one at a time. If the boxes can no longer all reach a target, you have lost.",
    ),
    "frozen_lake": Game(
        obstacle=HOLE,
        density=0.2,
        slips=0.1,
        rules="Cross the ice _ to G without falling into a hole O; you are P, # is the shore. The ice is slippery: a "
        "few moves go in another direction, the same one every time.",
    ),
    "maze": Game(obstacle=WALL, density=0.3, rules="Walk to G; you are P, # is a wall, _ is free."),
}
MOVES = ("up", "down", "left", "right")


class BoardState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The positions of the player and the boxes, as indices into the cells of the board."""

    you: int
    boxes: tuple[int, ...]  # sorted


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardWorld:
    size: int
    cells: str  # row by row, without the player and the boxes
    slips: dict[tuple[int, int], int]  # (position, intended offset) -> the offset that happens
    first: BoardState
    distances: dict[BoardState, int]  # moves to the goal, for each state that can reach it

    @property
    def opening(self) -> str:
        return _drawn(self, self.first)

    async def act(self, state: BoardState, action: str) -> Change[BoardState]:
        move = action.strip().lower()
        if move not in MOVES:
            raise InvalidAction("no such move")
        moved = _moved(self.cells, self.slips, state, _step(move, self.size))
        distance = self.distances.get(moved)
        return Change(state=moved, text=_drawn(self, moved), over=not distance, score=float(distance == 0))

    def admissible(self, state: BoardState) -> list[str]:
        """Return the moves that change the state."""
        return [move for move in MOVES if _moved(self.cells, self.slips, state, _step(move, self.size)) != state]

    def expert(self, state: BoardState) -> str:
        after = {move: _moved(self.cells, self.slips, state, _step(move, self.size)) for move in MOVES}
        return min(MOVES, key=lambda move: self.distances.get(after[move], len(self.distances)))


def make_board(task: Task, *, game: str, size: int) -> BoardWorld:
    num_boxes = 1 if game == "sokoban" else 0
    rng = task_rng(task, world=f"grid/{game}/{size}/{num_boxes}")
    while True:
        world = _draw(rng, GAMES[game], size, num_boxes)
        if world.distances.get(world.first, 0) >= size - 2 and split_of(world.opening) == task.split:
            return world


def _draw(rng: random.Random, game: Game, size: int, num_boxes: int) -> BoardWorld:
    """Return a random board, which may not be solvable."""
    inside = [row * size + column for row in range(1, size - 1) for column in range(1, size - 1)]
    # The border is a wall, so that no move leaves the board.
    cells = [FLOOR if position in inside else WALL for position in range(size * size)]
    chosen = rng.sample(inside, 2 + num_boxes)
    you, goal, *boxes = chosen
    for position in inside:
        if position not in chosen and rng.random() < game.density:
            cells[position] = game.obstacle
    cells[goal] = TARGET if boxes else GOAL
    steps = [_step(move, size) for move in MOVES]
    slips = {(position, step): rng.choice(steps) for position in inside for step in steps if rng.random() < game.slips}
    text, first = "".join(cells), BoardState(you=you, boxes=tuple(boxes))
    distances = distances_of(text, slips, first, steps)
    return BoardWorld(size=size, cells=text, slips=slips, first=first, distances=distances)


def _is_solved(cells: str, state: BoardState) -> bool:
    return all(cells[box] == TARGET for box in state.boxes) if state.boxes else cells[state.you] == GOAL


def distances_of(
    cells: str, slips: dict[tuple[int, int], int], first: BoardState, steps: list[int]
) -> dict[BoardState, int]:
    """Return the number of moves to the nearest solved state, for each reachable state that can be solved."""
    before: dict[BoardState, list[BoardState]] = {first: []}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        for following in (_moved(cells, slips, state, step) for step in steps):
            if following not in before:
                before[following] = []
                queue.append(following)
            before[following].append(state)
    distances = {state: 0 for state in before if _is_solved(cells, state)}
    queue = deque(distances)
    while queue:
        state = queue.popleft()
        for earlier in before[state]:
            if earlier not in distances:
                distances[earlier] = distances[state] + 1
                queue.append(earlier)
    return distances


def _step(move: str, size: int) -> int:
    return {"up": -size, "down": size, "left": -1, "right": 1}[move]


def _moved(cells: str, slips: dict[tuple[int, int], int], state: BoardState, step: int) -> BoardState:
    if cells[state.you] == HOLE:
        return state
    step = slips.get((state.you, step), step)
    to = state.you + step
    if cells[to] == WALL:
        return state
    if to not in state.boxes:
        return BoardState(you=to, boxes=state.boxes)
    beyond = to + step
    if cells[beyond] == WALL or beyond in state.boxes:
        return state
    return BoardState(you=to, boxes=tuple(sorted(beyond if box == to else box for box in state.boxes)))


def _drawn(world: BoardWorld, state: BoardState) -> str:
    cells = list(world.cells)
    for box in state.boxes:
        cells[box] = BOX_ON_TARGET if cells[box] == TARGET else BOX
    cells[state.you] = YOU_ON_TARGET if cells[state.you] == TARGET else YOU
    rows = [cells[start : start + world.size] for start in range(0, len(cells), world.size)]
    return "\n".join(" ".join(row) for row in rows)
