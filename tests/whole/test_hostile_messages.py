"""Messages that mean harm are refused: in bounded memory, in bounded time, and with their sender named."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.common.records.trajectory import MAX_REWARDS, MAX_SPANS, MAX_TURNS, InvalidTrajectory, check
from tests.common.records.test_trajectory import VOCAB_SIZE, WHOLE, a_span, a_turn
from tests.processes import python
from tests.replay.records.attempts import Views, leased, ticket
from tests.whole.hostile import BOMBS

NUM_MUTATIONS = int(os.environ.get("SLIPSTREAM_MUTATIONS", "5000"))
MAX_GROWN_KIB = 64 * 1024
MAX_SECONDS = 2.0  # 50 ms where nothing else wants the cores; others may
MAX_REFUSAL_CHARS = 1000


def swallowed(*arguments: str) -> dict[str, Any]:
    """What the process that swallowed it says; its memory has hardly grown."""
    ended = python("-m", "tests.whole.hostile", *arguments, timeout_s=600)
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    print(answer)
    assert answer["grown_kib"] < MAX_GROWN_KIB
    return answer


def test_damaged_records_are_refused_or_still_sound_and_cost_nothing() -> None:
    """Any other exception than the two that callers know ends the process, and so this test."""
    answer = swallowed("fuzz", "20261121", str(NUM_MUTATIONS))
    assert 0.9 * NUM_MUTATIONS < answer["num_refused"] < NUM_MUTATIONS
    assert answer["slowest_s"] < MAX_SECONDS
    assert answer["longest_chars"] < MAX_REFUSAL_CHARS


def test_each_bomb_is_refused_in_the_memory_of_its_own_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in BOMBS]
    for file, make in zip(files, BOMBS.values(), strict=True):
        file.write_bytes(make())
    answer = swallowed("bomb", *map(str, files))
    assert len(answer["refusals"]) == len(BOMBS)
    assert all(refusal is not None and len(refusal) < MAX_REFUSAL_CHARS for refusal in answer["refusals"])
    assert answer["slowest_s"] < MAX_SECONDS


def test_bombs_in_the_buffer_are_set_aside_with_their_senders(buffer: Views, redis_url: str) -> None:
    """Each sender commits a sound trajectory, and puts its bomb in the place of the payload."""
    buffer.learner.open([ticket(group_id, num_members=1) for group_id in range(len(BOMBS) + 1)])
    for bomb in [*BOMBS.values(), None]:
        lease = leased(buffer, "any")
        group_id = lease.ticket.group_id
        buffer.insert(lease, 0, actor=f"sender-{group_id}")
        if bomb is not None:
            (name,) = buffer.names(f"blob:{group_id}")
            buffer.client.set(name, bomb())
    answer = swallowed("claim", redis_url, buffer.run_id, str(len(BOMBS) + 1))
    assert answer["num_claimed"] == 1  # the sound one
    set_aside = {found.group_id: found for found in buffer.quarantined()}
    assert set(set_aside) == set(range(len(BOMBS)))
    assert {found.actor for found in set_aside.values()} == {f"sender-{number}" for number in range(len(BOMBS))}
    assert all(0 < len(found.reason) < MAX_REFUSAL_CHARS for found in set_aside.values())
    ledger = buffer.ledger
    assert (ledger.quarantined, ledger.claimed, ledger.dropped) == (len(BOMBS), 1, {})
    assert ledger.balanced and buffer.audit() == []


def test_what_no_reader_takes_is_refused_where_it_is_made() -> None:
    many = {f"reward-{number}": 0.0 for number in range(MAX_REWARDS + 1)}
    for change, why in [
        ({"turns": [a_turn(2, 5, rewards=many), a_turn(7, 10)]}, f"has {MAX_REWARDS + 1} rewards"),
        ({"version_spans": [a_span(2, 3, 0)] * (MAX_SPANS + 1)}, f"the limits are {MAX_TURNS} and {MAX_SPANS}"),
    ]:
        with pytest.raises(InvalidTrajectory, match=why):
            check(msgspec.structs.replace(WHOLE, **change), vocab_size=VOCAB_SIZE)
