"""`slipstream eval`: its numbers by another way to the same, and formats side by side on the same tasks."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.actors.engine.orders import Refused
from slipstream.actors.host.act import make_setup
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.headline import wilson
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.tools.lab.soak.scripted_engine import Schedule, ScriptedEngine
from slipstream.tools.play import fixed_policy
from slipstream.tools.play.eval_attempt import WAYS, Played, chosen
from slipstream.tools.play.eval_options import EvalOptions
from slipstream.tools.play.eval_report import compared, pass_at, report, spread
from slipstream.tools.play.evaluate import evaluate_on
from tests.actors.episode.episodes import ids
from tests.common.text.small_tokenizer import CHATML, byte_tokenizer
from tests.tools.run.tiny_model import save_tiny_model

SEARCHED = ("dfsdt", "mcts", "tree_of_thoughts")


def played(index: int, *, success: bool, tokens: int = 10, **changes: Any) -> Played:
    facts = {"end": "", "mean_logprob": -1.0, "value": None, "num_turns": 4, "num_invalid": 0}
    counts = {"num_tokens": 100, "num_written": tokens}
    return Played(index=index, success=success, score=float(success), **(facts | counts | changes))


@pytest.mark.parametrize(
    ("num_attempts", "num_solved", "size"), [(4, 2, 2), (5, 0, 3), (5, 5, 1), (6, 4, 3), (3, 1, 3)]
)
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_success(num_attempts: int, num_solved: int, size: int) -> None:
    attempts = [place < num_solved for place in range(num_attempts)]
    choices = list(itertools.combinations(attempts, size))
    share = sum(any(choice) for choice in choices) / len(choices)
    assert math.isclose(pass_at(size, num_attempts=num_attempts, num_solved=num_solved), share)


def test_attempts_at_one_task_count_as_one_in_the_interval_of_success() -> None:
    episodes = [
        played(index, success=index < 3 and member < 2, tokens=4 * index, num_invalid=index)
        for index in range(4)
        for member in range(4)
    ]
    numbers = report(episodes)
    assert (numbers["num_tasks"], numbers["num_episodes"], numbers["success"]) == (4, 16, 0.375)
    assert (numbers["success_low"], numbers["success_high"]) == wilson(0.375, 4)
    assert (numbers["invalid_actions"], numbers["tokens_written"]) == (0.375, 6.0)
    assert [numbers["pass_at"][size]["rate"] for size in ("1", "2", "4")] == [0.375, 0.75 * (1 - 1 / 6), 0.75]


def test_the_difference_of_two_formats_is_over_the_tasks_that_both_played() -> None:
    first = [played(index, success=index == 0) for index in range(4)]
    second = [played(index, success=True) for index in (0, 1, 2)]
    head, rows = compared({"plain": first, "own": second})
    assert head[0] == "way" and head[-1] == "success less that of plain"
    assert [row[0] for row in rows] == ["plain", "own"] and rows[0][-1] == ""
    assert rows[1][-1] == spread([0.0, 1.0, 1.0], digits=3, sign="+")
    assert spread([0.0, 1.0, 1.0], digits=3, sign="+") == "+0.667 (+0.01 to +1.32)"
    assert compared({"a": [played(0, success=True)], "b": [played(1, success=True)]})[1][1][-1] == "no common task"


def test_each_way_chooses_by_its_own_number_and_a_tie_by_likelihood_or_place() -> None:
    attempts = [
        played(0, success=True, end="a", mean_logprob=-0.5, value=0.2),
        played(0, success=False, end="b", mean_logprob=-0.4, value=0.9),
        played(0, success=True, end="a", mean_logprob=-0.7, value=0.9),
    ]
    chosen_by = {way: attempts.index(choose(attempts)) for way, choose in WAYS.items()}
    assert chosen_by == {"likelihood": 1, "majority": 0, "reward_model": 1}
    assert WAYS["majority"](attempts[:2]) is attempts[1]  # one of each: the likelier


def test_a_choice_is_the_mean_over_whole_parts_of_the_attempts() -> None:
    attempts = [played(0, success=place in (0, 3), tokens=place, mean_logprob=-place) for place in range(5)]
    assert chosen(attempts, way="likelihood", size=2) == (0.5, 3.0)  # 0 of (0, 1), 2 of (2, 3); 4 is left over
    assert chosen(attempts, way="likelihood", size=8) == (1.0, 10.0)
    episodes = [*attempts, played(1, success=True), played(1, success=True)]
    best = report(episodes)["best_of"]
    assert list(best) == ["likelihood", "majority"] and list(best["majority"]) == ["1", "2", "5"]
    assert best["likelihood"]["2"]["rate"] == 0.75 and best["likelihood"]["2"]["tokens_written"] == 11.5


Write = Callable[[str, int], str]
OWN = {"call": {"write": "CALL {action} END"}}
SIZES = ["env.max_turns=5", "model.max_tokens=2048", "sampling.max_turn_tokens=64", "eval.num_tasks=6"]


def evaluated(
    options: EvalOptions, folder: Path, capsys: pytest.CaptureFixture[str], *, write: Write = lambda *_: "CALL red END"
) -> tuple[list[dict], str]:
    """Evaluate a policy that writes for a prompt and a seed; return the lines of JSON, and the rest."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.save_pretrained(folder)
    config = load_config(None, ["env.name=tests.guess:GuessEnv", *SIZES])
    config.env.formats = OWN

    def script(tokens: list[int], seed: int | None) -> list[int]:
        return ids(tokenizer, write(tokenizer.decode(tokens), seed or 0) + tokenizer.eos_token)

    engine = ScriptedEngine(script, policy_version=0, schedule=Schedule(token_time_s=0.0), max_tokens=2048)
    setup = make_setup(engine, name="eval", run=config, actors=config.actors, tokenizer=load_tokenizer(folder))
    assert evaluate_on(setup, config, options) == 0
    lines = capsys.readouterr().out.splitlines()
    rest = "\n".join(line for line in lines if not line.startswith("{"))
    return [json.loads(line) for line in lines if line.startswith("{")], rest


def test_formats_play_the_same_tasks_and_a_table_shows_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = EvalOptions(compare=("call", "action_tag", "plain"), attempts=2)
    results, table = evaluated(options, tmp_path, capsys)
    by_sampling = {(line["sampling"], line["format"]): line for line in results}
    assert len(by_sampling) == len(results) == 6
    for name, invalid in (("call", 0.0), ("action_tag", 1.0), ("plain", 1.0)):
        sampled, greedy = by_sampling["sampled", name], by_sampling["greedy", name]
        assert (sampled["num_tasks"], sampled["num_episodes"], greedy["num_episodes"]) == (6, 12, 6)
        assert sampled["invalid_actions"] == greedy["invalid_actions"] == invalid
        assert set(sampled["pass_at"]) == {"1", "2"} and "pass_at" not in greedy
    assert table.count("way ") == 2 and table.count("action_tag") == 2
    assert "success less that of call" in table


def test_searches_play_the_same_tasks_as_sampled_episodes_and_their_whole_cost_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colours = ("red", "green", "blue")
    write = lambda prompt, seed: colours[seed % 3]  # noqa: E731
    results, table = evaluated(EvalOptions(search=SEARCHED), tmp_path, capsys, write=write)
    ways = [(line["sampling"], line.get("search")) for line in results]
    assert ways == [("sampled", None), *(("sampled", name) for name in SEARCHED), ("greedy", None)]
    chain, *searches = results[:4]
    for found in searches:
        assert found["num_tasks"] == chain["num_tasks"] == 6
        assert found["success"] >= chain["success"], "it ends with the best that it found"
        assert found["tokens_written"] >= chain["tokens_written"], "what led nowhere is paid for too"
    assert max(found["success"] for found in searches) > chain["success"]
    assert all(table.count(name) == 1 for name in SEARCHED) and "success less that of plain" in table


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"search": ("none",)}, "`--search` must be some of tree_of_thoughts, dfsdt, mcts, graph_of_thoughts"),
        *(
            ({"search": ("mcts",)} | more, "`--search` must be empty with --server, --compare and --attempts")
            for more in ({"server": "x"}, {"attempts": 2})
        ),
        *(({"attempts": number}, "`--attempts` must be") for number in (0, 1001)),
        *(({"compare": names}, "`--compare` must be") for names in (("plain",), ("a", "a"))),
    ],
)
def test_options_that_contradict_or_compare_nothing_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        EvalOptions(**options)


class RefusingProcess:
    """What `VllmEngine` hears of an engine without room for a cache."""

    def send(self, order: object) -> None:
        pass

    def receive(self, *, timeout_s: float) -> Refused:
        return Refused(why="no room for the cache")

    def end(self, timeout_s: float) -> None:
        pass


def test_a_refusal_of_the_engine_names_the_settings_that_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_policy, "EngineProcess", RefusingProcess)
    folder = save_tiny_model(tmp_path, vocab_size=512)
    byte_tokenizer(CHATML).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"raise `actors.kv_cache_bytes`, or lower .*: no room for the cache"):
        fixed_policy.start_fixed_policy(load_config(None, [f"model.path={folder}"]), name="eval")


def test_an_evaluation_of_one_format_prints_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, table = evaluated(EvalOptions(), tmp_path, capsys)
    assert [line["sampling"] for line in results] == ["sampled", "greedy"] and table == ""
    assert all("format" not in line for line in results)
