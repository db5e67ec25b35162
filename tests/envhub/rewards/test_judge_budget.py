"""A judge's budget is one of the whole run: several processes share it, and a restart brings no new one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import book_on, judge_of, parts_of
from slipstream.replay.fleet.judge_account import JudgeAccount
from slipstream.replay.records.keys import key
from tests.actors.scripted_judge import ScriptedJudge, completion, impatient
from tests.envhub.rewards.test_group_judge import RUBRIC
from tests.envhub.rewards.test_rewards import episode_of, turn_of

__all__ = ["impatient"]  # fixtures


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    with ScriptedJudge(lambda request, number: completion("5")) as judge:  # 7 tokens each
        yield judge


def process(client: redis.Redis, run_id: str, server: ScriptedJudge, **settings: Any) -> Judge:
    """The judge of one process of the run, which has only just started."""
    given = {"part": "judge", "url": server.url, "model": "m", "rubric": RUBRIC, **settings}
    parts = parts_of("env.rewards", {"clear": given})
    book_on(JudgeAccount(client, run_id).add, [parts])
    return judge_of(parts[0])  # type: ignore[return-value]


def marks(judge: Judge, *replies: str) -> None:
    async def all_of() -> None:
        await asyncio.gather(*(judge(episode_of(turn_of(reply))) for reply in replies))

    asyncio.run(all_of())


@pytest.mark.parametrize(("name", "most"), [("max_total_tokens", 21), ("max_requests", 3)])
def test_processes_share_a_budget_and_a_new_one_has_no_budget_of_its_own(
    redis_client: redis.Redis, run_id: str, server: ScriptedJudge, name: str, most: int
) -> None:
    why = f"the budget of this run is spent: {name} is {most}, and it has used {most}"
    one, other = (process(redis_client, run_id, server, **{name: most}) for _ in range(2))
    marks(one, "a", "b")
    marks(other, "c")
    for judge in (one, other, process(redis_client, run_id, server, **{name: most})):
        with pytest.raises(EnvError, match=why):
            marks(judge, "d")
    assert len(server.requests) == 3
    marks(process(redis_client, run_id, server, **{name: 2 * most}), "d")
    assert len(server.requests) == 4, "a resumed run with a larger budget continues"
    marks(process(redis_client, f"{run_id}-other", server, **{name: most}), "e")  # another run has its own


async def test_requests_never_exceed_their_limit(redis_client: redis.Redis, run_id: str, server: ScriptedJudge) -> None:
    processes = [process(redis_client, run_id, server, max_requests=5) for _ in range(3)]
    asked = [judge(episode_of(turn_of(f"{at} {number}"))) for at, judge in enumerate(processes) for number in range(4)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert len(server.requests) == 5
    assert sum(isinstance(each, EnvError) for each in found) == 7


def test_money_is_summed_over_processes(redis_client: redis.Redis, run_id: str) -> None:
    for _ in range(2):
        sums = JudgeAccount(redis_client, run_id).add("j", 1, 10, 0.25)
    assert sums == (2, 20, 0.5)


@pytest.mark.parametrize("damage", ["garbage", "1e400", "nan", "9" * 30, "-7", "0"])
def test_a_sum_that_is_damaged_or_reset_counts_on(redis_client: redis.Redis, run_id: str, damage: str) -> None:
    account, name = JudgeAccount(redis_client, run_id), key(run_id, "judge:spent")
    account.add("other", 1, 1, 1.0)
    before = account.add("j", 5, 5, 5.0)
    for field in ("j requests", "j tokens", "j cost"):
        redis_client.hset(name, field, damage)
        after = account.add("j", 1, 2, 0.5)
        assert after == (before[0] + 1, before[1] + 2, before[2] + 0.5)
        before = after
    redis_client.delete(name)
    assert account.add("j", 0, 0, 0.0) == before
    assert account.add("other", 0, 0, 0.0) == (1, 1, 1.0)
    redis_client.hset(name, "j requests", damage)
    assert JudgeAccount(redis_client, run_id).add("j", 1, 0, 0.0)[0] == 1  # a process that knows nothing yet
