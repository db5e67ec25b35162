"""A record of generations that overlap: whichever order they end in, each stays with its prompt."""

import random
from dataclasses import replace

from slipstream.actors.engine.engine import Completion
from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.resume import resumed_record
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling, StopReason, VersionSpan, check
from slipstream.envhub.driving import Ending
from tests.actors.episode.episodes import attempt_on, completion_of, turns_of

CUT = Sampling(temperature=1.0, top_p=0.9, top_k=0, max_turn_tokens=8)


def made_up(rng: random.Random, number: int) -> Completion:
    """Up to three tokens whose log-probability is their number's."""
    tokens = [rng.randrange(50) for _ in range(rng.randint(1, 3))]
    cut = rng.randrange(len(tokens))
    parts = ((0, cut, number), (cut, len(tokens), number + 1))
    spans = [VersionSpan(start=start, stop=stop, policy_version=each) for start, stop, each in parts if start < stop]
    kept = kept_sets([[token] for token in tokens])
    return replace(completion_of(tokens, [-1.0 - number] * len(tokens), kept=kept), version_spans=spans)


def test_every_generation_keeps_its_prompt_logprobs_versions_and_kept_sets_in_any_order() -> None:
    rng = random.Random(3)
    for _ in range(100):
        record = EpisodeRecord(attempt=replace(attempt_on(), sampling=CUT))
        known: list[list[int]] = [[1, 2]]
        calls: list[tuple[list[int], Completion]] = []
        for number in range(rng.randint(1, 8)):
            prompt = rng.choice(known) + [rng.randrange(50) for _ in range(rng.randint(0, 2))]
            completion = made_up(rng, number)
            if rng.random() < 0.2 and record.turns:
                record = resumed_record(record.attempt, record.partial())
            record.add_call(prompt, completion, generate_s=0.0, env_s=0.0)
            calls.append((prompt, completion))
            known.append(prompt + completion.tokens)
        record.end(Ending(messages=(), rewards={"right": 1.0}, stop_reason=StopReason.DONE), env_s=0.0)
        trajectory = record.trajectory(StopReason.DONE)
        check(trajectory, vocab_size=50)
        logprobs = trajectory.behaviour_logprob_array().tolist()
        versions = trajectory.policy_version_array().tolist()
        found = [
            (*exchange, logprobs[turn.start : turn.stop], versions[turn.start : turn.stop])
            for turn, exchange in zip(trajectory.turns, turns_of(trajectory), strict=True)
        ]
        wanted = []
        for prompt, completion in calls:
            spans = [(span.policy_version, span.stop - span.start) for span in completion.version_spans]
            by_token = [version for version, count in spans for _ in range(count)]
            wanted.append((prompt, completion.tokens, completion.logprobs, by_token))
        assert sorted(found) == sorted(wanted)
        assert trajectory.total_reward == 1.0


def test_a_generation_extends_a_sequence_that_is_not_the_last() -> None:
    record = EpisodeRecord(attempt=attempt_on())
    for prompt, answer in (([1], 10), ([2], 20), ([1, 10, 3], 11), ([2, 20, 4], 21)):
        record.add_call(prompt, completion_of([answer], [-0.5]), generate_s=0.0, env_s=0.0)
    assert record.tokens == [1, 10, 3, 11, 2, 20, 4, 21]
    assert record.branch_starts == [0, 4]
    assert [(turn.start, turn.stop) for turn in record.turns] == [(1, 2), (3, 4), (5, 6), (7, 8)]
