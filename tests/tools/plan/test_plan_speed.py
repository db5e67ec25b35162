"""The speed and the cost of a planned run, computed by hand."""

import dataclasses
import random

import msgspec
import pytest

from slipstream.common.config.config import Config, load_config
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.tools.plan.measured_step import MeasuredStep
from slipstream.tools.plan.plan_options import GPUS, Gpu, PlanOptions
from slipstream.tools.plan.speed import Speed, advice_of, lag_of, speed_of
from slipstream.tools.simulate.calibration import PlayedTurn, StepTime
from slipstream.tools.simulate.simulated_engine import TokenTime
from tests.tools.plan.test_plan import STEP
from tests.tools.simulate.test_simulate import FACTS, world
from tests.tools.simulate.test_simulate import settings as settings_of

BILLION = msgspec.structs.replace(
    STEP,
    num_base_parameters=10**9,
    kv_token_bytes=100_000,
    num_attending=2,
    num_layers=2,
    flops_per_token=6e9,
    flops_per_pair=0.0,
    published_bytes=2 * 10**9,
)
GPUS["round"] = Gpu(memory_gib=80, tflops=100, gbyte_per_s=1000)
GPUS["slow"] = Gpu(memory_gib=80, tflops=1, gbyte_per_s=1000)
OPTIONS = PlanOptions(
    gpu="round",
    link_gbit_per_s=8.0,
    episode_tokens=1000,
    env_seconds=2.3,
    gpu_price=2.0,
)


@pytest.fixture(autouse=True)
def round_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("LEARNER_EFFICIENCY", 0.4),
        ("ENGINE_EFFICIENCY", 0.5),
        ("SAMPLED_SHARE", 0.5),
        ("SPREAD", 0.4),
    ):
        monkeypatch.setattr(f"slipstream.tools.plan.speed.{name}", value)


def settings(*overrides: str) -> Config:
    own = ["actors.count=2", "actors.max_episodes=10", "replay.group_size=4", "replay.groups_per_step=5"]
    more = ["model.max_tokens=2000", "learner.activation_checkpointing=false", *overrides]
    return load_config(None, [*own, *more], presets=["conf/objective/rloo.yaml"])


def speed(*overrides: str, step: MeasuredStep = BILLION, **changes: float | str) -> Speed:
    return speed_of(settings(*overrides), step, dataclasses.replace(OPTIONS, **changes))  # type: ignore[arg-type]


def test_every_stage_by_hand() -> None:
    """A model of 1e9 weights in bfloat16, 2 engines of 10 requests, and 20 episodes of 1,000 tokens a step.

    token      2e9 bytes of weights and 10 * 500 * 1e5 of keys and values, at 0.5e12 bytes/s         = 5 ms
    prefill    500 tokens of 2e9 operations at 0.5e14 a second                                       = 0.02 s
    episode    500 * 0.005 + 10 * 0.02 + 2.3                                                         = 5 s
    collect    20 / (2 * 10 / 5)                                                                     = 5 s
    train      20 * 1000 * 6e9 operations at 0.4e14 a second                                         = 3 s
    publish    2e9 bytes at 1e10 bytes/s, and the same to the engines of this host                   = 0.2, 0.4 s
    lag        the longest of 4 takes 5 * (1 + 0.4 * 1.044) = 7.09 s: 10.49 / 5 - 1 / 10             = 2.00
               99 % at most 5 * (1 + 0.4 * 2.806) = 10.61 s: ceil(14.01 / 5 + 4 / 5) - 1             = 3
    """
    found = speed()
    assert (found.num_engines, found.requests, found.requests_by) == (2, 10, "slots")
    assert found.token_s == pytest.approx(0.005) and found.prefill_s == pytest.approx(0.02)
    assert found.episode_s == pytest.approx(5.0) and found.collect_s == pytest.approx(5.0)
    assert found.sampled_per_s == pytest.approx(4 * 500)
    assert found.train_s == pytest.approx(3.0) and found.trained_per_s == pytest.approx(20_000 / 3)
    assert found.publish_s == pytest.approx(0.2) and found.refresh_s == pytest.approx(0.4)
    assert found.step_s == pytest.approx(5.0) and found.lag == pytest.approx(2.0, abs=0.005) and found.slow_lag == 3
    assert found.dollars_per_hour == pytest.approx(6.0)


SLOT_BOUND, FREE_SLOTS, LEARNER_BOUND, NEARLY = (24, 4.0), (512, 0.5), (128, 8.0), (64, 4.0)


@pytest.mark.parametrize(("num_slots", "train_s"), [SLOT_BOUND, FREE_SLOTS, LEARNER_BOUND, NEARLY])
@pytest.mark.parametrize(("group_size", "num_groups", "target_lag"), [(8, 8, 2), (4, 8, 4), (16, 4, 2), (8, 8, 1)])
def test_the_lag_of_a_simulated_run_is_near_its_closed_form(
    num_slots: int, train_s: float, group_size: int, num_groups: int, target_lag: int
) -> None:
    """Episodes of 5 s, normal with a spread of 0.4, and weights after 1 s; the simulation knows no formula."""
    sizes = {"group_size": group_size, "groups_per_step": num_groups, "target_lag": target_lag}
    chance = random.Random(0)
    episodes = [[PlayedTurn(num_tokens=1, env_s=max(0.0, chance.gauss(5, 2)))] for _ in range(2000)]
    facts = dataclasses.replace(
        FACTS,
        config=settings_of(**sizes),
        groups=[episodes],
        token_time=TokenTime(fixed_s=1e-6, per_request_s=0.0),
        step_times=[StepTime(of_batch_s=train_s, rest_s=0.0)],
        refresh_s=1.0,
    )
    found = world(facts, max_episodes=num_slots, replay=sizes).run()
    step_s = 3600 / found.steps_per_hour
    lag, slow = lag_of(
        ReplayConfig(**sizes), num_slots=num_slots, episode_s=5, spread=0.4, train_s=train_s, refresh_s=1, step_s=step_s
    )
    assert lag == pytest.approx(found.lag, rel=0.1) and abs(slow - found.slow_lag) <= 1


def test_what_changes_each_stage() -> None:
    assert speed("learner.ranks=2").train_s == pytest.approx(1.5)
    assert speed("learner.activation_checkpointing=true").train_s == pytest.approx(4.0)
    assert speed("objective.kl_coefficient=0.1").train_s == pytest.approx(4.0)
    assert speed("replay.target_lag=0", "replay.max_lag=0").step_s == pytest.approx(5.0 + 3.0 + 0.4)
    assert speed("replay.target_lag=0", "replay.max_lag=0").lag == 0
    pairs = msgspec.structs.replace(BILLION, flops_per_pair=1e6)
    assert speed(step=pairs).train_s == pytest.approx(3.0 + 20 * 500_500 * 1e6 / 4e13)
    split = speed("actors.tensor_parallel=2", step=msgspec.structs.replace(BILLION, num_kv_heads=8))
    assert split.token_s == pytest.approx(0.0025) and split.dollars_per_hour == pytest.approx(2 + 2 * 4)
    assert speed("actors.price_per_hour=0.3").dollars_per_hour == pytest.approx(2.6)
    assert speed(gpu="slow").token_s == pytest.approx(10 * 2e9 / 5e11)  # then operations take longer than bytes


def test_versions_go_to_every_engine_of_other_hosts_or_once_to_each_host_with_relays() -> None:
    """2e9 bytes over a link of 1e9 bytes/s, to 3 hosts of 2 engines."""
    assert speed(actor_gpus=2, actor_hosts=3).refresh_s == pytest.approx(0.2 + 12)
    assert speed("actors.transport=relay", actor_gpus=2, actor_hosts=3).refresh_s == pytest.approx(0.2 + 6)


def test_requests_are_bounded_by_slots_memory_or_admission() -> None:
    assert speed("actors.max_episodes=64").requests_by == "admission"
    assert speed("actors.max_episodes=64").requests == 30  # 20 episodes * (2 + 1) / 2 engines
    small = speed("actors.kv_cache_bytes=450000000")
    assert (small.requests, small.requests_by) == (4, "memory")  # 4,500 tokens are kept


@pytest.mark.parametrize(
    ("overrides", "changes", "advice"),
    [
        ([], {}, "the actors: 5.0 s for a step's episodes, the learner needs 3.0 s: use 4 actors instead of 2"),
        ([], {"env_seconds": 30.0}, "raise actors.max_episodes, as episodes mostly wait for the environment"),
        (["actors.max_episodes=64"], {"env_seconds": 30.0}, "raise replay.target_lag or replay.groups_per_step"),
        (["actors.kv_cache_bytes=450000000"], {}, "raise actors.tensor_parallel or the memory of the engines"),
        (["actors.count=6"], {}, "the learner: 3.0 s a step, actors need 1.7 s: raise learner.ranks, or use 4"),
        (["replay.target_lag=0", "replay.max_lag=0"], {}, "waiting: learner and actors take turns"),
        ([], {"actor_gpus": 2, "actor_hosts": 1, "link_gbit_per_s": 1.0}, "the weights: 32.2 s to all engines, 5.0 s"),
    ],
)
def test_the_bottleneck_is_named_with_a_remedy(overrides: list[str], changes: dict[str, float], advice: str) -> None:
    options = dataclasses.replace(OPTIONS, **changes)  # type: ignore[arg-type]
    config = settings(*overrides)
    assert advice in advice_of(config, speed_of(config, BILLION, options), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "H1"}, "`--gpu` must be"),
        ({"gpus": 0}, "`--gpus` must be"),
        ({"actor_gpus": -1}, "`--actor-gpus` must be"),
        ({"link_gbit_per_s": 0.0}, "--link-gbit-per-s"),
        ({"link_gbit_per_s": float("inf")}, "--link-gbit-per-s"),
        ({"env_seconds": -1.0}, "--env-seconds"),
        ({"actor_hosts": 2}, "--actor-hosts"),
    ],
)
def test_assumptions_without_a_meaning_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**options)  # type: ignore[arg-type]
