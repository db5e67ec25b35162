"""The state of a TextWorld game, without TextWorld: `tests/adapters/textworld` plays real games."""

from types import SimpleNamespace

from slipstream.common.records.trajectory import Task
from slipstream.envhub.adapters.textworld import TextWorldEnv, _Episode


def key_of(facts: list[str], *, score: float) -> str:
    env = TextWorldEnv.__new__(TextWorldEnv)
    task = Task(env="textworld", split="train", index=0)
    env._episode = _Episode(task=task, state=SimpleNamespace(facts=facts), score=score)
    return env.state_key()


def test_states_with_the_same_facts_differ_if_one_of_them_has_been_rewarded() -> None:
    """A game rewards each of its quests once: who takes a key again, after laying it down, earns nothing."""
    before, again = key_of(["on key table", "at P hall"], score=0.0), key_of(["at P hall", "on key table"], score=0.0)
    assert before == again
    assert before != key_of(["on key table", "at P hall"], score=1.0)
