"""The linter of objectives, and the recipes that come with Slipstream."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.run.check_input import check_input
from tests.learner.objective.objectives import check_objective

CONF = Path(__file__).parents[3] / "conf"
PRESETS = sorted((CONF / "objective").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_over_the_quickstart_and_goes_together(preset: Path) -> None:
    config = load_config(str(CONF / "quickstart.yaml"), [], presets=[str(preset)])
    check_objective(config)
    assert config.run.name == "quickstart"
    assert preset.read_text().startswith("# ")  # what it is, and where it was published
    assert "https://" in preset.read_text().split("objective:")[0]


def test_there_is_a_preset_for_every_surrogate() -> None:
    chosen = {load_config(str(preset), []).objective.surrogate for preset in PRESETS}
    assert chosen == {"ppo_clip", "gspo", "cispo", "dppo_tv"}  # policy_gradient is V-trace's part


GSPO = "surrogate=gspo clip_low=3e-4 clip_high=4e-4"
BY_20 = "a token of negative advantage can get a weight of 20"
BY_2E8 = "a token of negative advantage can get a weight of 2e+08, which is as good as unclipped; unclipped importance"
BEFORE_IT = "it has no effect: objective.mask_{}=5 stops every token before it"


@pytest.mark.parametrize(
    ("overrides", "reason", "cure"),
    [
        ("surrogate=gspo", "never gets that far from 1: nothing would be clipped", "the paper uses 3e-4 and 4e-4"),
        ("clip_low=3e-4 clip_high=4e-4", "nearly every token would be clipped", "or choose surrogate gspo"),
        ("surrogate=cispo correction=none ratio_high=25", "positive advantage can get", "(it is 25) to 20 at most; or"),
        ("correction=none", BY_2E8, "set objective.dual_clip=3"),
        ("mask_high=.inf", BY_2E8, "lower objective.mask_high (it is inf) to 20"),
        ("mask_high=20.5", BY_20, "lower objective.mask_high (it is 20.5)"),
        ("correction=none dual_clip=1e9", BY_2E8, "lower objective.dual_clip (it is 1e+09)"),
        ("clip_high=50 correction=none", "can get a weight", "lower objective.clip_high (it is 50) to 20 at most"),
        ("surrogate=cispo ratio_high=10", BEFORE_IT.format("high"), "change one of the two, or switch one off"),
        ("clip_low=0.6", "it has no effect: objective.mask_low=0.5 stops every token before it", "switch one off"),
        ("clip_high=9", BEFORE_IT.format("high"), "switch one off"),
        ("dual_clip=3", "has no effect: objective.clip_high=0.28 or objective.dual_clip=3 stops", "switch one off"),
        (GSPO, "a token of negative advantage can get a weight", "set objective.dual_clip=3"),
        (f"{GSPO} dual_clip=3", "objective.clip_low=0.0003 stops", "change one of the two"),
        ("advantage=gigpo allocation=per_turn", "objective.advantage gigpo", "gae or group_centred or group_standar"),
        ("gamma=0.9", "it has no effect with objective.advantage group_standardised", "leave it out"),
        ("surrogate=cispo max_negative_kl=0", "such runs collapsed at a lag of 8", "0.1, with which they did not"),
        ("surrogate=cispo clip_high=0.3", "no effect with objective.surrogate cispo", "gspo or ppo_clip"),
        ("correction=none mask_high=3", "no effect with objective.correction none", "choose token_mask"),
        ("normalisation_tokens=64", "no effect with objective.normalisation tokens", "choose constant"),
        ("advantage=gae", "it needs a critic, and objective.critic is `none`", "choose objective.critic own or shared"),
        ("critic=own", "group_standardised does not use a critic", "gae or bi_level_gae or vtrace, or critic none"),
        ("critic_warmup_steps=2", "no effect with objective.critic none", "choose own or shared"),
        ("advantage=gae critic=own turn_gamma=0.9", "no effect with objective.advantage gae", "bi_level_gae"),
        ("advantage=bi_level_gae critic=own allocation=per_turn", "no effect with", "or reinforce_pp or vtrace"),
        ("advantage=gae critic=own critic_warmup_steps=100", "learner.steps is 100, so", "fewer warm-up steps than"),
        ("advantage=vtrace critic=own", "would apply it a second time", "choose surrogate policy_gradient"),
        ("surrogate=policy_gradient", "nothing would correct a stale token", "choose advantage vtrace"),
        ("kl_place=reward", "no effect with objective.kl_coefficient 0", "set kl_coefficient above 0"),
    ],
)
def test_an_incoherent_objective_is_refused_with_reason_and_cure(overrides: str, reason: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="is incoherent") as raised:
        check_objective(of_objective(overrides))
    assert reason in str(raised.value) and cure in str(raised.value)


def of_objective(overrides: str, *others: str) -> Config:
    """A configuration with these settings of the objective, and others."""
    return load_config(None, [*(f"objective.{override}" for override in overrides.split()), *others])


SYNCHRONOUS = ("replay.target_lag=0", "replay.max_lag=0")
VTRACE = "advantage=vtrace critic=own surrogate=policy_gradient correction=none max_negative_kl=0"
REINFORCE = "surrogate=policy_gradient advantage=leave_one_out"
HALF, TWICE = "replay.keep_fraction=0.5", "replay.max_uses=2"


@pytest.mark.parametrize(
    ("objective", "others"),
    [
        ("surrogate=cispo correction=none ratio_high=1000", SYNCHRONOUS),  # without lag weights need no bound
        (REINFORCE, SYNCHRONOUS),
        (VTRACE, ["replay.max_lag=15"]),
        ("", [HALF]),
        ("surrogate=ppo_clip correction=none dual_clip=3", [TWICE]),  # what bounds a token may use a group again
        ("surrogate=cispo", [TWICE]),
        ("surrogate=dppo_tv correction=none", [TWICE]),
    ],
)
def test_what_goes_together_is_accepted(objective: str, others: Sequence[str]) -> None:
    check_objective(of_objective(objective, *others))


@pytest.mark.parametrize(
    ("objective", "others", "why"),
    [
        (REINFORCE, ["replay.target_lag=1", "replay.max_lag=1"], "replay.max_lag is 1.*replay.target_lag=0 and replay"),
        (VTRACE, ["replay.max_lag=16"], "vtrace clips no gradient, and such runs collapsed at a lag of 16"),
        ("reward_model=folder", [HALF], "`replay.keep_fraction` must be 1 with objective.reward_model, .*leave it out"),
        ("advantage=reinforce_pp", [HALF, "replay.group_size=1"], "must be 1 with replay.group_size 1, .*always 0"),
        ("", [HALF, TWICE], "`replay.keep_fraction` must be 1 where replay.max_uses > 1"),
        ("surrogate=cispo correction=none", [TWICE], "max_uses is 2, and token weights are capped but never 0"),
    ],
)
def test_settings_that_the_objective_does_not_fit_are_refused(objective: str, others: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_objective(of_objective(objective, *others))


AGENT = "env.name=agent env.options.agent=tests.envhub.agents:chats model.path=x warm_start.episodes=0"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("model.tool_parser=hermes", "has no effect in `env.name` shop: .*got 'hermes'; leave it out"),
        (f"{AGENT} model.context=window", "`model.context` window has no effect in `env.name` agent"),
        ("objective.mask_high=.inf", r"a token of negative advantage can get a weight of 2e\+08"),
    ],
)
def test_a_start_refuses_settings_without_effect_and_asks_the_loss_too(settings: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_input(load_config(None, settings.split()))
