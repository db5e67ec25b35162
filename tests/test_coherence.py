"""The linter of objectives, and the recipes that come with Slipstream."""

from pathlib import Path

import pytest

from common.config import Config, load_config
from common.config_error import ConfigError
from learner.objective.coherence import check_coherence
from tools.check_input import check_input

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted((CONF / "objective").glob("*.yaml"))


def test_the_defaults_go_together() -> None:
    check_coherence(Config())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads_over_the_quickstart_and_goes_together(preset: Path) -> None:
    config = load_config(str(CONF / "quickstart.yaml"), [], presets=[str(preset)])
    check_coherence(config)
    assert config.run.name == "quickstart"
    assert preset.read_text().startswith("# ")  # what it is, and where it was published
    assert "https://" in preset.read_text().split("objective:")[0]


def test_there_is_a_preset_for_every_surrogate() -> None:
    chosen = {load_config(str(preset), []).objective.surrogate for preset in PRESETS}
    assert chosen == {"ppo_clip", "gspo", "cispo", "aipo", "dppo_tv", "dppo_kl"}  # policy_gradient is V-trace's part


@pytest.mark.parametrize(
    ("overrides", "reason", "cure"),
    [
        (["surrogate=aipo", "correction=truncated_is"], "aipo has itself a ratio", "use none or a mask"),
        (["surrogate=dppo_tv", "correction=decoupled"], "dppo_tv has itself a ratio", "surrogate ppo_clip or cispo"),
        (["surrogate=gspo"], "never gets that far from 1: nothing would be clipped", "3e-4 and 4e-4 are the paper's"),
        (["clip_low=3e-4", "clip_high=4e-4"], "nearly every token would be clipped", "or choose surrogate gspo"),
        (
            ["surrogate=aipo", "ratio_high=1000"],
            "a ratio up to 1000 is as good as unclipped, and unclipped importance sampling collapses under lag",
            "keep it at 20 at most, or train with replay.target_lag=0 and replay.max_lag=0",
        ),
        (["correction=truncated_is", "max_behaviour_weight=.inf"], "a ratio up to inf", "keep it at 20 at most"),
        (["clip_high=50"], "a ratio up to 51 is as good as unclipped", "keep it at 20 at most"),
        (["allocation=per_turn"], "no effect with objective.advantage group_standardised",
         "choose gae or reinforce_pp or vtrace"),
        (["advantage=reinforce_pp", "allocation_discount=0.5"], "no effect with objective.allocation last_token",
         "choose discounted"),
        (["gamma=0.9"], "it has no effect with objective.advantage group_standardised", "leave it out"),
        (["same_state_weight=2"], "it has no effect with objective.advantage group_standardised",
         "choose gigpo or gigpo_centred"),
        (["surrogate=cispo", "clip_high=0.3"], "no effect with objective.surrogate cispo", "gspo or ppo_clip"),
        (["correction=none", "mask_high=3"], "no effect with objective.correction none", "choose token_mask"),
        (["normalisation_tokens=64"], "no effect with objective.normalisation tokens", "choose constant"),
        (["advantage=gae"], "it compares with a critic, and there is none", "choose objective.critic own or shared"),
        (["critic=own"], "group_standardised never asks it", "gae or bi_level_gae or vtrace, or critic none"),
        (["value_clip=0.5"], "no effect with objective.critic none", "choose own or shared"),
        (["advantage=gae", "critic=own", "value_coefficient=1"], "no effect with objective.critic own", "shared"),
        (["advantage=gae", "critic=own", "turn_gamma=0.9"], "no effect with objective.advantage gae", "bi_level_gae"),
        (["advantage=bi_level_gae", "critic=own", "allocation=per_turn"], "no effect with", "gae or reinforce_pp"),
        (["advantage=gae", "critic=own", "critic_warmup_steps=100"], "learner.steps is 100, so that the policy would "
         "never learn", "leave steps to the policy"),
        (["advantage=vtrace", "critic=own"], "would put it in twice", "choose surrogate policy_gradient"),
        (["surrogate=policy_gradient"], "nothing would bound a stale token", "choose advantage vtrace"),
        (["advantage=vtrace", "critic=own", "surrogate=policy_gradient", "max_rho=100"],
         "a ratio up to 100 is as good as unclipped", "keep it at 20 at most"),
        (["advantage=vtrace", "critic=own", "surrogate=policy_gradient", "correction=truncated_is"],
         "policy_gradient has itself a ratio", "use none or a mask"),
        (["kl_coefficient=0.1", "kl_estimator=k1"], "its gradient is zero on average", "objective.kl_place=reward"),
        (["kl_coefficient=0.1", "kl_place=reward"], "only that of k1 gives the divergence's gradient", "use k1"),
        (["kl_place=reward"], "no effect with objective.kl_coefficient 0", "give the divergence a weight"),
        (["reference_every=10"], "no effect with objective.kl_coefficient 0", "leave it out"),
    ],
)  # fmt: skip
def test_an_incoherent_objective_is_refused_with_the_reason_and_the_cure(
    overrides: list[str], reason: str, cure: str
) -> None:
    config = load_config(None, [f"objective.{override}" for override in overrides])
    with pytest.raises(ConfigError, match="is incoherent") as raised:
        check_input(config)  # what `slipstream up` and `slipstream learner` do before they start anything
    assert reason in str(raised.value)
    assert cure in str(raised.value)


def test_without_lag_weights_need_no_bound() -> None:
    synchronous = ["replay.target_lag=0", "replay.max_lag=0"]
    check_coherence(load_config(None, [*synchronous, "objective.surrogate=aipo", "objective.ratio_high=1000"]))


MAX_USES = "replay.max_uses=2"


@pytest.mark.parametrize("bounded", [["surrogate=ppo_clip", "correction=none"], ["correction=decoupled"],
                                     ["surrogate=cispo"], ["surrogate=dppo_tv", "correction=none"]])  # fmt: skip
def test_what_bounds_a_token_may_use_a_group_again(bounded: list[str]) -> None:
    check_coherence(load_config(None, [MAX_USES, *(f"objective.{override}" for override in bounded)]))


@pytest.mark.parametrize("unbounded", [["surrogate=cispo", "correction=none"], ["correction=truncated_is"]])
def test_what_never_stops_pushing_a_token_may_not_use_a_group_again(unbounded: list[str]) -> None:
    config = load_config(None, [MAX_USES, *(f"objective.{override}" for override in unbounded)])
    with pytest.raises(ConfigError, match=r"replay\.max_uses is 2, and their weights are cut but never 0"):
        check_coherence(config)


def test_a_chosen_group_is_no_candidate_again() -> None:
    with pytest.raises(ConfigError, match=r"`replay\.keep_fraction` must be 1 where replay\.max_uses > 1"):
        load_config(None, ["replay.keep_fraction=0.5", "replay.max_uses=2"])
