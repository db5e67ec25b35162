"""What judges refuse is refused where the configuration is loaded, and by each verb before it waits for anything."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.host.host_parts import check_environments
from slipstream.actors.host.rehearse import check_template
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.envhub.rewards.part import actors_judge, reward_parts
from slipstream.tools.run.doctor import print_missing
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer
from tests.replay.buffer.every_verb import FACTS
from tests.tools.cli.verbs import Output

RUBRIC = "{text: x, scale: [0, 1], criteria: {a: b}}"
BY_URL = f"{{part: judge, url: 'http://127.0.0.1:1/v1', model: m, compare: listwise, rubric: {RUBRIC}}}"
BY_ACTORS = f"{{part: judge, url: actors, compare: listwise, rubric: {RUBRIC}}}"
MALFORMED = f"{{part: judge, url: here, model: m, rubric: {RUBRIC}}}"


def test_a_malformed_judge_is_refused_at_once_and_doctor_has_a_line_about_it(
    tmp_path: Path, refused: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"run.root={tmp_path}", "redis.url=redis://127.0.0.1:1", f"env.rewards.clear={MALFORMED}"]
    for verb in ("up", "actors", "plan"):
        assert "`env.rewards.clear.url` must be like http://host:8000/v1, got 'here'" in refused(verb, *settings), verb
    print_missing(load_config(None, settings[-1:]))
    assert "rewards: FAULT: `env.rewards.clear.url` must be like http://host:8000/v1" in capsys.readouterr().out


def run_with(**rewards: str) -> Config:
    return load_config(None, [f"env.rewards.{name}={judge}" for name, judge in rewards.items()])


def test_actors_judge_all_groups_of_a_run_if_one_judge_is_its_own_policy() -> None:
    def judging(config: Config) -> bool:
        return actors_judge(reward_parts(config.env.entries()).values())

    assert judging(run_with(better=BY_ACTORS)) and judging(run_with(other=BY_URL, better=BY_ACTORS))
    assert not judging(run_with(other=BY_URL))
    assert not judging(run_with(clear=BY_ACTORS.replace("compare: listwise, ", "")))


def test_up_starts_a_judge_process_unless_the_actors_judge(tmp_path: Path, printed: Output) -> None:
    for judge, processes in ((BY_ACTORS, []), (BY_URL, ["judge"])):
        said = printed("up", "run.name=dry", "--dry-run", f"run.root={tmp_path}", f"env.rewards.better={judge}")
        started = [line.split(":")[0] for line in said.splitlines()]
        assert started == ["redis", "GPUs", "learner", "actors", *processes, "tensorboard"]


def test_an_actor_that_judges_groups_needs_the_key_of_every_judge_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with_key = BY_URL.replace("model: m", "model: m, key_env: JUDGE_KEY")
    check_environments(run_with(other=with_key), FACTS)  # its process is `slipstream serve judge`
    with pytest.raises(ConfigError, match=r"`env.rewards.other`: key_env names the environment variable JUDGE_KEY"):
        check_environments(run_with(other=with_key, better=BY_ACTORS), FACTS)


@pytest.mark.parametrize("compare", ["", "compare: listwise, "])
def test_a_rubric_that_fills_the_context_of_the_policy_is_refused_before_an_engine_starts(compare: str) -> None:
    tokenizer: Any = merging_tokenizer(CHATML)
    judge = BY_ACTORS.replace("compare: listwise, ", compare)
    short, long = run_with(better=judge), run_with(better=judge.replace("text: x", f"text: {'x ' * 5000}"))
    for config in (short, long):
        config.model.max_tokens = 2000
    check_template(short, tokenizer)
    with pytest.raises(ConfigError, match=r"better.rubric` must be shorter than `model.max_tokens` = 2000"):
        check_template(long, tokenizer)
