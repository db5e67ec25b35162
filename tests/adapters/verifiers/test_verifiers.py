"""verifiers' own package plays episodes of its own tasksets, and asks our endpoint. `make test-adapters-verifiers`.

The package lies in an environment of its own, VERIFIERS_PYTHON, and this process has none of it. Its harness is a
script that `uv` prepares: from PyPI, the first time.
"""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.records.trajectory import Outcome, StopReason, Task, Trajectory, check
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, ids, rollout_of
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer

PYTHON = os.environ["VERIFIERS_PYTHON"]
PATIENT = replace(ALLOWANCE, step_timeout_s=300.0, episode_timeout_s=600.0)
NULL = {"harness": {"id": "null"}}
DIRECT = {"harness": {"id": "direct"}}  # faster, and all the rest is verifiers' own
SUMS = {"taskset": {"id": "verifiers_sums"}}
CORRECTED = {"taskset": {"id": "corrected"}, "solver": DIRECT}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("model")
    merging_tokenizer(CHATML).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def tasksets_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[3] / "docs" / "examples" / "foreign"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(examples)]))


def part(config: dict[str, Any], **options: Any) -> MixtureEntry:
    return MixtureEntry(name="verifiers", options={"python": PYTHON, "config": config, **options})


def play(
    options: MixtureEntry, tokenizer: PreTrainedTokenizerBase, *says: str, members: int = 1, **allowance: Any
) -> list[Trajectory]:
    """Episodes of one task, side by side, in which the policy says one thing after another, letter by letter."""

    def script(tokens: list[int], seed: int | None) -> list[int]:
        turn = tokenizer.decode(tokens).count("<|im_start|>assistant") - 1
        letters = [token for letter in says[turn] for token in ids(tokenizer, letter)]
        return [*letters, tokenizer.eos_token_id]

    engine = engine_of(script)
    task = Task(env="sums", split="train", index=0)

    async def one(member: int) -> Trajectory:
        record = EpisodeRecord(attempt=replace(attempt_on(), task=task, member=member))
        async with fresh_env({"sums": options}, task, timeout_s=60.0) as env:
            patient = replace(PATIENT, **allowance)
            return await rollout_of(env, engine, record=record, tokenizer=tokenizer, allowance=patient)

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(*(one(member) for member in range(members)))

    return asyncio.run(all_of_them())


def texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The prompt of each branch and the answer to it."""
    stops = [*trajectory.branch_starts[1:], trajectory.num_tokens]
    tokens = trajectory.token_array()
    return [tokenizer.decode(tokens[start:stop]) for start, stop in zip(trajectory.branch_starts, stops, strict=True)]


def test_an_episode_with_its_own_harness_is_recorded_and_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    started = time.monotonic()
    first, second = play(part(SUMS | {"agent": NULL}), tokenizer, "1", members=2)
    print(f"two episodes of one turn: {time.monotonic() - started:.1f} s")
    check(first, vocab_size=len(tokenizer))
    (text,) = texts(first, tokenizer)
    number = int(text.removeprefix("<|im_start|>user\n").split("+")[0])
    assert text == f"<|im_start|>user\n{number}+1?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>"
    assert [turn.rewards for turn in first.turns] == [{"right": float(number == 0), "short": 0.5}]
    assert (first.stop_reason, first.outcome) == (StopReason.DONE, Outcome.POLICY)
    assert first.tokens == second.tokens


def test_two_turns_train_what_was_sampled_and_not_its_encoding(tokenizer: PreTrainedTokenizerBase) -> None:
    """The policy says "ab" letter by letter, and the tokenizer would encode it as one token."""
    (trajectory,) = play(part(CORRECTED), tokenizer, "ab", "ba")
    check(trajectory, vocab_size=len(tokenizer))
    tokens = trajectory.token_array()
    assert [tokens[turn.start : turn.stop].tolist() for turn in trajectory.turns] == [
        [*ids(tokenizer, "a"), *ids(tokenizer, "b"), tokenizer.eos_token_id],
        [*ids(tokenizer, "b"), *ids(tokenizer, "a"), tokenizer.eos_token_id],
    ]
    assert texts(trajectory, tokenizer)[-1].endswith(
        "assistant\nab<|im_end|>\n<|im_start|>user\nare you sure?<|im_end|>\n<|im_start|>assistant\nba<|im_end|>"
    )
    print(f"branches: {trajectory.branch_starts}")


def test_the_runs_limit_of_turns_ends_an_episode_that_is_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    (trajectory,) = play(part(CORRECTED), tokenizer, "0", "1", max_turns=1)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 1)
    assert trajectory.turns[0].rewards["short"] == 0.5


def test_a_full_context_ends_an_episode_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    (trajectory,) = play(part(CORRECTED), tokenizer, "a" * 30, "b", max_tokens=80)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TOKENS, 1)
    assert trajectory.outcome is Outcome.POLICY


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (SUMS | {"agent": {**DIRECT, "sampling": {"temperature": 0.3}}}, "temperature is 1.0"),
        (SUMS, "the harness bash of agent runs the policy's code; set a runtime"),
        ({"taskset": {"id": "no_such_taskset"}, "agent": DIRECT}, "no_such_taskset"),
        (SUMS | {"id": "best_of_n", "n": 2, "agent": DIRECT}, "2 traces of the agent agent"),
        (SUMS | {"agent": DIRECT, "mistake": 1}, "mistake"),
    ],
)
def test_what_does_not_fit_says_why(tokenizer: PreTrainedTokenizerBase, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EpisodeFailed, match=complaint) as failed:
        play(part(config), tokenizer, "1")
    assert failed.value.outcome is Outcome.ENV_FAILURE
