"""A user's own parts: those of docs/extend.md train as printed, and each mistake is refused before a run starts."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.actors.episode.answer import parsed
from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.action_format import action_format
from slipstream.envhub.env import EnvError
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.checkpoint.conditions import conditions_of, differences
from slipstream.learner.credit.token_advantages import sequences_with_advantages, teaches
from slipstream.learner.probation.bounds import check_on_rank
from slipstream.learner.ranks.ranks import Ranks
from slipstream.tools.run.check_input import check_env, check_input
from tests.actors.episode.episodes import ALLOWANCE, engine_of, expert, play
from tests.common.text.small_tokenizer import shop_tokenizer
from tests.learner.even_game import group_of, load_player, train
from tests.learner.objective.objectives import check_objective
from tests.learner.objective.test_objective_proof import attempt
from tests.tools.run.tiny_model import save_tiny_model
from tests.whole.wrong_parts import Deaf

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "extend.md").read_text()
FILES = dict(re.findall(r"^`(my_\w+\.py)`\..*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [line.split()[3:] for line in re.findall(r"^slipstream up conf/quickstart.yaml .*$", PAGE, re.MULTILINE)]
ON_POLICY = ["replay.target_lag=0", "replay.max_lag=0"]


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PYTHONPATH with the page's files."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def configured(*settings: str, base: str | None = None) -> Config:
    return load_config(base, [setting.replace("=wrong:", "=tests.whole.wrong_parts:") for setting in settings])


def test_the_page_shows_each_part_in_a_dozen_lines() -> None:
    assert list(FILES) == ["my_advantage.py", "my_surrogate.py", "my_correction.py", "my_format.py"]
    assert max(len([line for line in code.splitlines() if line]) for code in FILES.values()) <= 12


@pytest.mark.parametrize("settings", COMMANDS, ids=lambda settings: settings[0].removeprefix("run.name="))
def test_every_command_of_the_page_is_accepted(settings: list[str], on_disk: Path) -> None:
    config = configured(*settings, base=str(REPOSITORY / "conf" / "quickstart.yaml"))
    assert len(COMMANDS) == len(FILES)
    check_objective(config)
    check_env(config.env)


def test_all_parts_of_the_page_together_learn_a_simple_game(on_disk: Path, tmp_path: Path, ranks: Ranks) -> None:
    save_tiny_model(tmp_path / "model")
    parts = ["objective.advantage=my_advantage:ranked", "objective.surrogate=my_surrogate:soft_gate"]
    parts += ["objective.correction=my_correction:unmoved", f"model.path={tmp_path / 'model'}"]
    config = configured(*parts, "optim.lr=3e-3", "learner.steps=30", "learner.micro_batch_tokens=512")
    learner, player = load_player(config, tmp_path, ranks)
    metrics, rewards = train(learner, player, steps=12)
    assert np.mean(rewards[:2]) < 2.6 < 2.9 < np.mean(rewards[-2:])  # of 4, when every token is even
    assert not any(step.skipped for step in metrics)


def test_the_format_of_the_page_is_played_in_the_shop(on_disk: Path) -> None:
    tokenizer, own, env = shop_tokenizer("my_format:Act"), action_format("my_format:Act"), ShopEnv()
    assert own.parse("I think so.\nACT: click[a]\nno\nACT : click[b] ").text == "click[b]"
    assert not own.parse("click[a]").valid
    engine, allowance = engine_of(expert(env, tokenizer, own), max_tokens=512), replace(ALLOWANCE, max_tokens=512)
    trajectory = play(env, engine, tokenizer=tokenizer, action_format=own, allowance=allowance)
    assert trajectory.success and all(turn.valid_action for turn in trajectory.turns)


# Parts of tests/whole/wrong_parts.py, and the complaint about each.
WRONG = {
    "advantage": {
        "inverted_": "did you mean inverted?",
        "NUMBER": "NUMBER must be a function, got float",
        "without_arguments": "takes 0 positional arguments but 1 was given; it is called as function(",
        "divided_by_nothing": "must give one finite number for each return, gave array([nan, nan, nan]",
        "one_for_all": "must give one finite number for each return, gave 0.5 for [0.0, 1.0]",
        "words": "must give one finite number for each return, gave ['good', 'good']",
        "upside_down": "the best attempt is trained less than the worst; change its sign",
        "by_place": "equal returns must get equal advantages",
        "noisy": "make it a function of the returns",
        "nothing": "gave only zeros",
    },
    "surrogate": {
        "too_few_arguments": "it is called as function(current_logprobs, *, behaviour_logprobs, advantages",
        "only_losses": "must return a slipstream.learner.objective.surrogate.Surrogate, got a Tensor",
        "detached": "returns losses without a gradient to current_logprobs",
        "overflowing": "returns -inf in losses for log-ratio 100",
        "other_weights": "returns weights that are not those of its losses",
        "weights_with_gradient": "returns weights with a gradient; return weights.detach()",
        "wrong_sign": "returns negative weights, which train bad attempts",
        "averaged": "the objective would depend on how tokens are packed",
        "fails_without_tokens": "also with no tokens",
    },
    "correction": {
        "a_surrogate": "must return a slipstream.learner.objective.correction.Correction, got a Surrogate",
        "inverted": "returns inf in weights for log-ratio -100",
        "untraining": "returns negative weights",
        "relative": "the objective would depend on how tokens are packed",
    },
}


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("advantage=nowhere:ranked", "cannot import nowhere: No module named 'nowhere'; is its folder on PYTHONPATH?"),
        ("advantage=my code:f", "must be module:NAME, got 'my code:f'"),
        *((f"{kind}=wrong:{name}", why) for kind, parts in WRONG.items() for name, why in parts.items()),
    ],
)
def test_a_part_that_could_not_be_trained_with_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_objective(configured(f"objective.{setting}"))
    assert complaint in str(raised.value)
    assert f"`objective.{setting.partition('=')[0]}`" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "reason", "cure"),
    [
        (
            ["surrogate=wrong:weighted", "correction=none"],
            "can get a weight of 2e+08, which is as good as unclipped",
            "limit the weight in tests.whole.wrong_parts:weighted; or train with replay.target_lag=0",
        ),
        (["correction=wrong:neutral"], "a token of negative advantage can get a weight of 2e+08", "dual_clip=3"),
        (["correction=wrong:long_mask"], "a token of negative advantage can get a weight of 2e+08", "dual_clip=3"),
        (["surrogate=wrong:plain"], "would correct a stale token (replay.max_lag is 8)", "multiply by the ratio"),
        (
            ["surrogate=wrong:capped", "max_negative_kl=0"],
            "clips no gradient of tokens that did badly",
            "use 0.1, with which they did not collapse",
        ),
        (
            ["surrogate=wrong:capped", "mask_high=4", "clip_high=0.5"],
            "no effect with objective.surrogate tests.whole.wrong",
            "leave it out",
        ),
        (
            ["advantage=wrong:above_a_half", "gamma=0.9"],
            "no effect with objective.advantage tests.whole.wrong_parts:above",
            "leave it out",
        ),
        (["advantage=wrong:above_a_half", "critic=own"], "does not use a critic", "or critic none"),
    ],
)
def test_a_part_is_judged_by_the_loss_like_a_built_in_one(settings: list[str], reason: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="is incoherent") as raised:
        check_objective(configured(*(f"objective.{setting}" for setting in settings)))
    assert reason in str(raised.value) and cure in str(raised.value)


def test_a_group_is_not_used_again_by_what_never_stops_pushing() -> None:
    reuse = ["replay.max_uses=2", "objective.surrogate=wrong:capped"]
    check_objective(configured(*reuse))  # the default token_mask stops it
    with pytest.raises(ConfigError, match=r"replay\.max_uses is 2, and tokens keep a weight however far"):
        check_objective(configured(*reuse, "objective.correction=none"))


@pytest.mark.parametrize("name", ["weighted", "plain"])
def test_what_needs_a_bound_or_a_ratio_under_lag_is_accepted_on_policy(name: str) -> None:
    check_objective(configured(*ON_POLICY, f"objective.surrogate=wrong:{name}", "objective.correction=none"))


def test_a_group_teaches_if_the_function_gives_it_an_advantage() -> None:
    own = configured("objective.advantage=wrong:above_a_half").objective
    rng = np.random.default_rng(0)
    group = group_of([attempt(rng, alike=True), attempt(rng, alike=True)])
    (gained, _), total = sequences_with_advantages([group], objective=own), group.trajectories[0].total_reward
    assert gained.advantages[gained.loss_mask].tolist() == pytest.approx([total - 0.5] * int(gained.loss_mask.sum()))
    assert teaches(group, objective=own) and not teaches(group, objective=Config().objective)


def test_the_check_before_a_start_names_the_wrong_shape(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with pytest.raises(ConfigError, match=r"must return `losses` as a tensor \(0,\) of torch.float32 on cpu, got a"):
        check_input(configured("objective.surrogate=wrong:one_number"))


def test_every_rank_refuses_its_own_copy(ranks: Ranks) -> None:
    check_on_rank(Config(), device=ranks.device)
    with pytest.raises(ConfigError, match="without a gradient"):
        check_on_rank(configured("objective.surrogate=wrong:detached"), device=ranks.device)


def test_a_re_run_reports_that_the_file_of_a_part_has_changed(on_disk: Path, ranks: Ranks) -> None:
    config = configured("objective.advantage=my_advantage:ranked")
    before = conditions_of(config, ranks=ranks)
    assert before["objective.advantage"] == "my_advantage:ranked"
    (on_disk / "my_advantage.py").write_text(FILES["my_advantage.py"] + "# changed\n")
    (line,) = differences(before, conditions_of(config, ranks=ranks))
    assert line.startswith("file of objective.advantage was ")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "reakt",
            "must be one of plain, action_tag, react, outcome, tools, a name that you define in env.formats, or "
            "module:Class for your own, got 'reakt'; did you mean react?",
        ),
        ("tests.whole.wrong_parts:nothing", "nothing must be a class, got function"),
        ("tests.whole.wrong_parts:Deaf", "failed: RuntimeError: I hear nothing; it is made without arguments"),
        ("tests.whole.wrong_parts:Forgetful", "from 'do click[red]', its own text for the action 'click[red]'"),
    ],
)
def test_a_wrong_action_format_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_env(configured(f"env.action_format={name}").env)
    assert "`env.action_format`" in str(raised.value) and complaint in str(raised.value)


def test_a_format_that_fails_while_it_is_played_fails_the_episode() -> None:
    with pytest.raises(EnvError, match=r"`env\.action_format` failed: RuntimeError: I hear nothing"):
        parsed(Deaf(), "do something")
