"""What a process logged last is quoted without its time, and never as a bar of progress."""

from pathlib import Path

from slipstream.replay.run.observer import last_error, last_line

LOG = """2026-11-29 07:51:16,001 INFO the model is loaded
2026-11-29 07:51:17,001 ERROR it failed
ValueError: 3 is too many
2026-11-29 07:51:18,001 WARNING it continues
Writing shards:   0%|          | 0/1 [00:00<?, ?it/s]\rWriting shards: 100%|##########| 1/1 [00:00<00:00]
"""


def test_the_last_words_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text(LOG)
    assert last_line(log) == "WARNING it continues"
    assert last_error(log) == "ValueError: 3 is too many"
    log.write_text(LOG.splitlines()[0])
    assert last_line(log) == "the model is loaded"
    assert last_line(tmp_path / "missing.log") == ""
