"""The state of a TextWorld game, without TextWorld: `tests/adapters/textworld` plays real games."""

from pathlib import Path
from types import SimpleNamespace

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.textworld import TextWorldEnv, _Episode, games_in


def key_of(facts: list[str], *, score: float) -> str:
    env = TextWorldEnv.__new__(TextWorldEnv)
    task = Task(env="textworld", split="train", index=0)
    env._episode = _Episode(task=task, state=SimpleNamespace(facts=facts), total_reward=score)
    return env.state_key()


def test_states_with_the_same_facts_differ_if_one_of_them_has_been_rewarded() -> None:
    """A game rewards each of its quests once: who takes a key again, after laying it down, earns nothing."""
    before, again = key_of(["on key table", "at P hall"], score=0.0), key_of(["at P hall", "on key table"], score=0.0)
    assert before == again
    assert before != key_of(["on key table", "at P hall"], score=1.0)


def test_the_words_by_which_alfworld_leaves_games_out_do_not_count_above_the_configured_folder(tmp_path: Path) -> None:
    folder = tmp_path / "movable disk" / "train"
    games = [folder / name / "trial" / "game.tw-pddl" for name in ("look-Apple", "look-AppleSliced", "with_movable")]
    for game in games:
        game.parent.mkdir(parents=True)
        game.write_text('{"solvable": true}')
    assert games_in(folder) == games[:1]
