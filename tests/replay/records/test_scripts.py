"""A script is sent again as often as the server forgets it."""

import pytest
import redis

from slipstream.replay.records.scripts import Script


def test_a_script_that_is_forgotten_between_load_and_call_is_sent_again(
    redis_client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(redis_client, f"return '{run_id}'")
    sent: list[str] = []

    def load(text: str) -> None:
        sent.append(text)
        if len(sent) == 3:
            monkeypatch.undo()
            redis_client.script_load(text)

    monkeypatch.setattr(redis_client, "script_load", load)
    assert script(keys=["key"]) == run_id.encode()
    assert sent == 3 * [script.text]
