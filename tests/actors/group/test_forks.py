"""Groups that are grown as trees: who forks from whom, what they share, and what is counted and trained."""

import asyncio
import dataclasses
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import redis

from slipstream.actors.group.episode_reward import Scoring
from slipstream.actors.search.next_fork import next_fork
from slipstream.common.config.config import load_config
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.config.objective_config import ObjectiveConfig
from slipstream.common.config.replay_config import SEARCHES
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.wire import encode
from slipstream.common.records.trajectory import Fork, InvalidTrajectory, Trajectory, check
from slipstream.envhub.env import Observation
from slipstream.envhub.rewards.part import reward_parts
from slipstream.learner.batch.pack import count_loss_tokens
from slipstream.learner.credit.token_advantages import sequences_with_advantages
from slipstream.learner.credit.tree import leaves_of
from slipstream.replay.records.forks import awaited, planned_forks
from slipstream.replay.records.ticket import Group, Ticket
from slipstream.tools.run.check_input import check_input
from tests.actors.episode.episodes import ALLOWANCE
from tests.actors.group.test_group import TOKENIZER, Actor, buffer_with, let_go, nobodys
from tests.guess import GuessEnv
from tests.learner.objective.objectives import check_objective
from tests.replay.records.attempts import Views, leased, ticket
from tests.waiting import until

TURNS, MEMBERS, TREES = 4, 8, 2
TICKET = ticket(1, num_members=MEMBERS, num_trees=TREES, max_fork_turn=3)
PLAN = planned_forks(TICKET)
SEARCHED = [ticket(1, num_members=MEMBERS, num_trees=TREES, max_fork_turn=3, search=search) for search in SEARCHES]
of_each = pytest.mark.parametrize("of", [TICKET, *SEARCHED], ids=lambda of: of.search or "random")


class Forgets(GuessEnv):
    """An environment that never gets into the same state again."""

    def state_key(self) -> str:
        return f"{id(self)} {super().state_key()}"


class EndsEarly(GuessEnv):
    """An environment that ends some episodes after their first turn: those with `black` in it."""

    async def step(self, action: str) -> Observation:
        answer = await super().step(action)
        return dataclasses.replace(answer, terminated=answer.terminated or "black" in action)


def claimed(buffer: Views) -> Group:
    (group,) = buffer.learner.claim(1, 1, policy_version=0, max_lag=0)
    return group


def grown(client: redis.Redis, run_id: str, *, of: Ticket = TICKET, **settings: Any) -> Group:
    buffer = buffer_with(client, run_id, of)
    Actor("actor", run_id, **({"turns": TURNS} | settings)).plays(buffer)
    return claimed(buffer)


def num_own_sampled(members: list[Trajectory]) -> int:
    return sum(int(member.loss_mask_array()[member.own_start :].sum()) for member in members)


def test_each_member_begins_with_the_turns_of_its_parent_token_by_token(redis_client: redis.Redis, run_id: str) -> None:
    buffer = buffer_with(redis_client, run_id, TICKET)
    actor = Actor("actor", run_id, turns=TURNS)
    actor.plays(buffer)
    members = claimed(buffer).trajectories
    forks = [member for member in members if member.fork]
    assert {member.member: member.fork for member in forks} == PLAN
    for member in forks:
        parent, stop = members[member.fork.parent], member.own_start
        assert stop == parent.turns[member.fork.num_turns].start
        for array in ("token", "behaviour_logprob", "loss_mask", "policy_version"):
            mine, its = (getattr(each, f"{array}_array")()[:stop].tolist() for each in (member, parent))
            assert mine == its
        assert member.turns[: member.fork.num_turns] == parent.turns[: member.fork.num_turns]
    # Shared turns are sampled once, and counted once.
    assert len(actor.seeds) == len(set(actor.seeds)) == sum(len(member.own_turns) for member in members)
    assert actor.setup.episodes.kept_tokens == num_own_sampled(members)
    ledger = buffer.ledger
    assert ledger.tokens["produced"] == sum(member.num_own_tokens for member in members)
    assert ledger.turns["produced"] == sum(len(member.own_turns) for member in members)
    assert (ledger.inserted, ledger.claimed) == (MEMBERS, 1)
    assert buffer.audit() == []


@pytest.mark.parametrize("of", SEARCHED, ids=lambda of: of.search)
def test_a_search_chooses_among_attempts_that_have_ended(redis_client: redis.Redis, run_id: str, of: Ticket) -> None:
    members = grown(redis_client, run_id, of=of).trajectories
    for number in range(TREES, MEMBERS):
        expected = next_fork(members[: number - number % TREES], ticket=of)
        assert (members[number].member, members[number].fork) == (number, expected)
    forks = [member for member in members if member.fork]
    assert forks
    for member in forks:
        parent = members[member.fork.parent]
        assert member.tokens[: 4 * member.own_start] == parent.tokens[: 4 * member.own_start]
        assert member.turns[: member.fork.num_turns] == parent.turns[: member.fork.num_turns]


def test_from_an_episode_that_is_over_no_member_forks(redis_client: redis.Redis, run_id: str) -> None:
    of = ticket(0, num_members=MEMBERS, num_trees=TREES, max_fork_turn=3)
    members = grown(redis_client, run_id, of=of, env_name=f"{__name__}:EndsEarly").trajectories
    plan = planned_forks(of)
    for number, fork in plan.items():
        parent = members[fork.parent]
        can_be_left = parent.fork == plan.get(fork.parent) and fork.num_turns < len(parent.turns)
        assert members[number].fork == (fork if can_be_left else None)
    assert {members[number].fork is None for number in plan} == {True, False}


@of_each
@pytest.mark.parametrize("turn", range(TURNS + 2))
def test_leaving_before_forks_changes_nothing(redis_client: redis.Redis, run_id: str, turn: int, of: Ticket) -> None:
    """Whole turns are handed in; parents that are stored come back with the next lease. At last some forks play.

    A fork that another actor continues stays where it was chosen.
    """
    expected = grown(redis_client, f"{run_id}-undisturbed", of=of).trajectories
    buffer = buffer_with(redis_client, run_id, of)
    leaver = Actor("leaver", run_id, turns=TURNS, step_s=0.1)

    def stands_in_turn() -> bool:
        return len(leaver.seeds) >= TREES * (turn + 1) and leaver.engine.load().num_running == 0

    def has_begun_forks() -> bool:
        have_ended = buffer.ledger.inserted >= TREES
        return have_ended and (turn == TURNS or (len(leaver.seeds) > TREES * TURNS and stands_in_turn()))

    async def play() -> None:
        task = asyncio.create_task(leaver.play(buffer))
        await until(stands_in_turn if turn < TURNS else has_begun_forks)
        await let_go(task)

    asyncio.run(play())
    assert buffer.audit() == []
    assert buffer.ledger.redone_members == 0
    heir = Actor("heir", run_id, turns=TURNS)
    lease = heir.lease(buffer)
    for member, partial in lease.partials.items():
        assert partial.fork == expected[member].fork
    heir.plays(buffer, lease)
    assert buffer.audit() == []
    found = claimed(buffer).trajectories
    assert [nobodys(member) for member in found] == [nobodys(member) for member in expected]
    assert leaver.setup.episodes.kept_tokens + heir.setup.episodes.kept_tokens == num_own_sampled(found)


@of_each
@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_heir_has_the_stored_parents(redis_client: redis.Redis, run_id: str, is_damaged: bool, of: Ticket) -> None:
    """Of an actor that died. One that cannot be read costs only its forks."""
    expected = grown(redis_client, f"{run_id}-undisturbed", of=of).trajectories
    buffer = buffer_with(redis_client, run_id, of)
    dead = leased(buffer, "dead")
    for member in expected[:TREES]:
        buffer.actor.insert(dead, msgspec.structs.replace(member, run_id=run_id))
    buffer.actor.release(dead)  # as an expired lease is; then its members are missing in the same way
    for name in redis_client.scan_iter(f"{buffer.base}:blob:1:*") if is_damaged else ():
        redis_client.set(name, b"garbage")
    heir = Actor("heir", run_id, turns=TURNS)
    lease = heir.lease(buffer)
    if not is_damaged:
        assert set(lease.stored) == {each for before in awaited(of).values() for each in before if each < TREES}
        assert sorted(lease.missing) == list(range(TREES, MEMBERS))
    heir.plays(buffer, lease)
    ledger = buffer.ledger
    assert (ledger.inserted, ledger.ready, ledger.failed) == (MEMBERS, 1, {})
    if not is_damaged:
        assert [nobodys(member) for member in claimed(buffer).trajectories] == [nobodys(member) for member in expected]
        assert buffer.audit() == []


def test_an_environment_without_replays_drops_its_groups(redis_client: redis.Redis, run_id: str) -> None:
    buffer = buffer_with(redis_client, run_id, TICKET)
    Actor("actor", run_id, turns=TURNS, env_name=f"{__name__}:Forgets").plays(buffer)
    assert buffer.ledger.dropped == {"replay_mismatch": 1}
    assert "the state before turn 0 differs" in buffer.learner.failures()[0].reason
    assert buffer.audit() == []


def test_parts_of_the_reward_count_once_in_a_fork(redis_client: redis.Redis, run_id: str) -> None:
    """A fork replays its parent's turns as the environment rewards them, and is then scored as a whole."""
    entry = MixtureEntry(name="tests.guess:GuessEnv", rewards={"goal": {"weight": 2.0}})
    buffer = buffer_with(redis_client, run_id, TICKET)
    actor = Actor("actor", run_id, turns=TURNS)
    scoring = Scoring(parts=reward_parts({"shop": entry}), tokenizer=TOKENIZER, allowance=ALLOWANCE)
    actor.setup = dataclasses.replace(actor.setup, scoring=scoring)
    actor.plays(buffer)
    plain = grown(redis_client, f"{run_id}-plain").trajectories
    for scored, unscored in zip(claimed(buffer).trajectories, plain, strict=True):
        assert scored.fork == unscored.fork
        assert [turn.rewards["goal"] for turn in scored.turns] == [2 * turn.rewards["said"] for turn in unscored.turns]


@of_each
def test_every_sampled_token_is_trained_in_one_sequence(redis_client: redis.Redis, run_id: str, of: Ticket) -> None:
    group = grown(redis_client, run_id, of=of)
    sequences = sequences_with_advantages([group], objective=ObjectiveConfig(advantage="tree"))
    assert count_loss_tokens(sequences) == num_own_sampled(group.trajectories)
    for member, sequence in zip(group.trajectories, sequences, strict=True):
        assert sequence.tokens.tolist() == member.token_array().tolist()  # what it shares is its context
        assert not sequence.loss_mask[: member.own_start].any()
        assert (sequence.advantages[~sequence.loss_mask] == 0).all()
        assert sequence.trajectory_tokens == sequence.loss_mask.sum()


@of_each
def test_a_common_bonus_changes_nothing_and_the_loss_stays_a_mean(
    redis_client: redis.Redis, run_id: str, of: Ticket
) -> None:
    group = grown(redis_client, run_id, of=of)

    def all_of(trajectories: list[Trajectory], normalisation: str = "tokens") -> list[float]:
        changed = msgspec.structs.replace(group, trajectories=trajectories)
        objective = ObjectiveConfig(advantage="tree", normalisation=normalisation)
        sequences = sequences_with_advantages([changed], objective=objective)
        return np.concatenate([each.advantages[each.loss_mask] for each in sequences]).tolist()

    def with_bonus(member: Trajectory) -> Trajectory:
        last = msgspec.structs.replace(member.turns[-1], rewards={**member.turns[-1].rewards, "bonus": 1.0})
        return msgspec.structs.replace(member, turns=[*member.turns[:-1], last])

    by_tokens, by_attempts = all_of(group.trajectories), all_of(group.trajectories, "constant")
    assert np.allclose(all_of([with_bonus(member) for member in group.trajectories]), by_tokens, atol=1e-6)
    ratios = {round(a / b, 5) for a, b in zip(by_tokens, by_attempts, strict=True) if b}
    assert len(ratios) == 1  # one scale for all


def test_a_fork_of_another_parent_than_is_there_begins_at_the_start(redis_client: redis.Redis, run_id: str) -> None:
    members = grown(redis_client, run_id).trajectories
    number, fork = next(iter(PLAN.items()))
    changed = np.array(members[fork.parent].token_array())
    changed[0] += 1
    members[fork.parent] = msgspec.structs.replace(members[fork.parent], tokens=changed.tobytes())
    assert leaves_of(members, [member.total_reward for member in members])[number].fork is None
    assert [leaf.fork for leaf in leaves_of(members[:TREES], [0.0] * TREES)] == [None] * TREES


def test_a_place_has_one_name_whichever_member_is_called_its_parent(redis_client: redis.Redis, run_id: str) -> None:
    members = grown(redis_client, run_id).trajectories
    deep = next(number for number, fork in PLAN.items() if fork.parent in PLAN)
    above = PLAN[deep].parent
    # It names that fork as its parent, at the turn at which this leaves its own parent.
    moved = Fork(parent=above, num_turns=PLAN[above].num_turns)
    twin = msgspec.structs.replace(members[above], member=deep, fork=moved)
    assert leaves_of([*members[:deep], twin], [0.0] * (deep + 1))[deep].fork == PLAN[above]


def test_a_fork_against_its_record_or_in_a_group_without_trees_is_bad(redis_client: redis.Redis, run_id: str) -> None:
    member = next(member for member in grown(redis_client, run_id).trajectories if member.fork)
    for fork, complaint in (
        (Fork(parent=5, num_turns=1), "its parent must have a lower number"),
        (Fork(parent=0, num_turns=4), "must have a turn of its own"),
    ):
        with pytest.raises(InvalidTrajectory, match=complaint):
            check(msgspec.structs.replace(member, member=2, fork=fork), vocab_size=10**6)
    with pytest.raises(InvalidTrajectory, match="in a group of 0 trees"):
        ticket(1, num_members=MEMBERS).check_owns(member, run_id=run_id, outcome=member.outcome)
    assert b"fork" in encode(member)


TREE = ["objective.advantage=tree", "replay.trees=random:2"]
MCTS = ["objective.advantage=tree", "replay.trees=mcts:2"]
AGENT = ["env.name=agent", "env.options.agent=tests.envhub.agents:chats", "warm_start.episodes=0", "model.path=x"]


@pytest.mark.parametrize("trees", [TREE, MCTS])
def test_trees_are_accepted_with_their_advantage(trees: list[str]) -> None:
    check_objective(load_config(None, trees))
    check_objective(load_config(None, [*trees, "objective.normalisation=constant", "replay.target_lag=0"]))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["objective.advantage=tree"], "replay.trees is empty.*or choose leave_one_out"),
        (["replay.trees=random:2"], "must be empty with objective.advantage group_standardised.*compare them with th"),
        ([*TREE, "objective.normalisation=sequences"], "a fork trains only its own tokens"),
        (
            ["objective.advantage=tree", "replay.trees=dfsdt:1"],
            "`replay.trees` must be empty, or dfsdt:N with N from 2 to replay.group_size - 1 = 7, got 'dfsdt:1'",
        ),
        ([*TREE, "replay.group_size=64"], "random:N with N from 4 to replay.group_size - 1 = 63.*at most 16 attempts"),
        ([*TREE, "env.max_turns=1"], "must be empty with env.max_turns 1"),
        (["replay.trees=2"], "replay.trees` must be empty, or N trees as random:N, mcts:N, .*got '2'.*random:2 is two"),
        (["replay.trees=mcts:-2"], "must be empty, or N trees as random:N"),
        (["replay.trees=graph_of_thoughts:2"], "got 'graph_of_thoughts:2'.*has another prompt, so it is no sibling"),
        (["replay.num_trees=2"], "did you mean `replay.trees`"),
        (
            [*MCTS, "objective.reward_model=x"],
            "`replay.trees` must be empty or random:N with objective.reward_model, got 'mcts:2'.*comes after all",
        ),
        ([*MCTS, "env.rewards={liked: {part: judge, compare: listwise}}"], "with env.rewards.liked, got 'mcts:2'"),
        ([*MCTS, "objective.normalisation=sequences"], "a fork trains only its own tokens"),
        ([*TREE, "objective.allocation=per_turn"], "no effect with objective.advantage tree"),
        ([*TREE, "objective.critic=own"], "does not use a critic"),
        (["objective.advantage=gigpo", "replay.trees=mcts:2"], "must be empty with objective.advantage gigpo"),
        ([*MCTS, *AGENT], "`replay.trees` must be empty with `env.name` agent.*plays its episodes itself"),
    ],
)
def test_combinations_that_would_be_wrong_are_refused_with_the_reason(settings: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(complaint, re.DOTALL)):
        check_input(load_config(None, settings))
