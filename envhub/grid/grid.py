"""`grid`: small games: Sokoban, a frozen lake, a maze and a bandit. Each task is a different board or bandit."""

from functools import partial

from slipstream.envhub.env import Env
from slipstream.envhub.env_options import check_choice, check_range
from slipstream.envhub.grid.bandit import RULES, make_bandit
from slipstream.envhub.grid.board import GAMES, MOVES, make_board
from slipstream.envhub.world import WorldEnv, rules_in

MAX_SIZE = {"sokoban": 8, "frozen_lake": 12, "maze": 15}


def make_grid_env(*, game: str = "sokoban", profile: str = "small", size: int = 6) -> Env:
    """Return an environment of one of the games. Raises ValueError for invalid options.

    `profile`: see `rules_in`. `size`: the side of the board in cells, walls included.
    """
    check_choice("game", game, (*GAMES, "bandit"))
    if game == "bandit":
        return WorldEnv(f"grid bandit {profile}", make_world=make_bandit, rules=rules_in(profile, RULES))
    check_range("size", size, 5 if game == "sokoban" else 4, MAX_SIZE[game])
    return WorldEnv(
        f"grid {game} {profile} size={size}",
        make_world=partial(make_board, game=game, size=size),
        rules=rules_in(profile, f"{GAMES[game].rules} Write one of: {', '.join(MOVES)}."),
    )
