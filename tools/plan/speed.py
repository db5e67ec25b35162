"""How fast a planned run would be, and what it would cost: a roofline of each stage, from stated assumptions.

Nothing here is measured. A stage takes the operations or the bytes that it cannot avoid, divided by the peak of the
device times an assumed efficiency. All functions are pure.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from slipstream.common.config.config import Config
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.tools.plan.measured_step import MeasuredStep
from slipstream.tools.plan.memory import ENGINE_DTYPE_BYTES, engine_memory
from slipstream.tools.plan.plan_options import GPUS, PlanOptions

LEARNER_EFFICIENCY = 0.35  # share of a GPU's peak that the learner reaches
ENGINE_EFFICIENCY = 0.5  # share of peak and bandwidth that an engine reaches
SAMPLED_SHARE = 0.3  # of an episode's tokens: the policy samples them
SPREAD = 0.3  # standard deviation of a group's durations, over their mean
MEAN_SHARE, SLOW_SHARE = 0.5264, 0.99  # of normal maxima: below their mean, and the slowest in a hundred
NEVER_WAITS = 1.02  # the step, over its training, of a learner that does not wait
FULL, FREE = 0.9, 0.7  # shares of the slots in use: groups wait for one above the first, and begin at once below
FORWARD = 1 / 3  # of the operations of a training step; the backward pass has the other two thirds
GIGA, TERA = 1e9, 1e12
HOST_BYTES_PER_S = 10 * GIGA  # from a GPU to its host and back: what pageable memory reaches over PCIe 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Estimates of a planned run."""

    num_engines: int
    requests: int  # of one engine at a time
    requests_by: str  # what bounds them: "slots", "memory" or "admission"
    token_s: float  # from one token of a request to the next
    prefill_s: float  # of the prompts of an episode, for the engine alone
    episode_s: float
    sampled_per_s: float  # tokens, of all engines, if nothing else limits them
    collect_s: float  # until all engines have finished the episodes of a step
    train_s: float  # of a step
    trained_per_s: float  # tokens, of the learner, if nothing else limits it
    publish_s: float  # until a version is in the host's memory
    refresh_s: float  # until every engine has received a whole version
    step_s: float  # from one step to the next
    lag: float  # optimizer steps, of the oldest token, on average
    slow_lag: int  # likewise, the most of 99 % of the groups
    dollars_per_hour: float


def speed_of(config: Config, step: MeasuredStep, options: PlanOptions) -> Speed:
    """Estimate every stage of a run, which must have actors.

        token    = (weights + requests * kept tokens * bytes of a token's keys and values) / memory bandwidth,
                   or requests * operations of a token / peak, if that is longer
        episode  = sampled tokens * token + requests * prefill + environment
        collect  = episodes of a step / (engines * requests / episode)
        train    = operations of a step / (ranks * peak)
        step     = the longer of collect and train; both, and the weights' way, if target_lag is 0

    With adapters, the operations of a step are over-estimated: those of whole weights.
    """
    replay, tokens = config.replay, options.tokens_of(config)
    episodes = replay.group_size * replay.groups_per_step
    engines = options.actor_hosts * config.actors.count
    requests, by = _requests(config, step, options, engines=engines, tokens=tokens)
    token_s = _token_s(config, step, options, requests=requests, tokens=tokens)
    sampled = tokens * SAMPLED_SHARE
    prefill_s = FORWARD * _operations(step, tokens - sampled) / _engine_flops(config, options)
    episode_s = sampled * token_s + requests * prefill_s + options.env_seconds
    episodes_per_s = engines * requests / episode_s
    collect_s = episodes / episodes_per_s
    train_s = _train_s(config, step, options, episodes=episodes, tokens=tokens)
    publish_s = step.published_bytes / (HOST_BYTES_PER_S)
    refresh_s = publish_s + _transfer_s(config, step, options, engines=engines)
    is_synchronous = replay.target_lag == 0
    step_s = collect_s + train_s + refresh_s if is_synchronous else max(collect_s, train_s)
    lag, slow_lag = lag_of(
        replay,
        num_slots=engines * (config.actors.max_episodes if by == "admission" else requests),
        episode_s=episode_s,
        spread=SPREAD,
        train_s=train_s,
        refresh_s=refresh_s,
        step_s=step_s,
    )
    return Speed(
        num_engines=engines,
        requests=requests,
        requests_by=by,
        token_s=token_s,
        prefill_s=prefill_s,
        episode_s=episode_s,
        sampled_per_s=episodes_per_s * sampled,
        collect_s=collect_s,
        train_s=train_s,
        trained_per_s=episodes * tokens / train_s,
        publish_s=publish_s,
        refresh_s=refresh_s,
        step_s=step_s,
        lag=lag,
        slow_lag=slow_lag,
        dollars_per_hour=_dollars_per_hour(config, options, engines),
    )


def lag_of(
    replay: ReplayConfig,
    *,
    num_slots: int,
    episode_s: float,
    spread: float,
    train_s: float,
    refresh_s: float,
    step_s: float,
) -> tuple[float, int]:
    """Optimizer steps from the version of a group's oldest token to its training: the mean, and the most of 99 %.

    Batches are claimed at c, c - step, c - 2 step, ..., and the weights of each step are served train + refresh after
    its claim. A group that began `age` before its claim at c has missed the versions that were served since:

        lag = number of k >= 1 with c - k step + train + refresh > c - age = ceil(x) - 1
        x = (age + train + refresh) / step

    As groups begin at any time, its mean is x - 1/2. The age is the longest episode of the group, and then the wait for
    the last of the G groups of the batch. One is ready every step / G, so it is 0 to (G - 1) / G steps, half of that on
    average. So

        mean = (longest + train + refresh) / step - 1 / (2 G)
        most = ceil((longest of 99 % + train + refresh) / step + (G - 1) / G) - 1

    By Little's law admission bounds the mean: G (target_lag + 1) groups are open, without those in training, so from
    opening to claim they take step (target_lag + 1) - train. Where slots stay free, they begin at once, while the
    newest weights are on their way: target_lag + 1. Between full and free slots the mean is in proportion. Where the
    learner never waits, train = step, and groups wait for these weights first: target_lag, if the slow ones end in that
    time.

    Of episodes of 5 s with a spread of 0.4, the longest of 8 is 7.85 s on average and 11.03 s in 99 % of the groups.
    With train 6 s, refresh 1 s, and a step every 8 s of 4 groups: 14.85 / 8 - 1 / 8 = 1.73; ceil(18.03 / 8 + 3 / 4) - 1
    = 3.
    """
    most, num_groups = replay.target_lag, replay.groups_per_step
    longest_s, slow_s = (
        episode_s * (1 + spread * _longest(replay.group_size, share)) for share in (MEAN_SHARE, SLOW_SHARE)
    )
    slow = math.ceil((slow_s + train_s + refresh_s) / step_s + (num_groups - 1) / num_groups) - 1
    if most == 0:
        return 0.0, 0
    if step_s < NEVER_WAITS * train_s:
        return float(most + (refresh_s + slow_s > most * step_s)), max(most + 1, slow)
    mean = min((longest_s + train_s + refresh_s) / step_s - 1 / (2 * num_groups), most + 1.0)
    used = replay.group_size * num_groups * episode_s / step_s / num_slots
    mean += (most + 1 - mean) * min(max((FULL - used) / (FULL - FREE), 0.0), 1.0)
    return mean, max(math.ceil(mean), slow)


def _longest(group_size: int, share: float) -> float:
    """What the longest of so many normal durations exceeds in all but a `share` of groups, in standard deviations.

    All are at most z with the probability F(z) ^ group_size. Of 8, the mean 1.42 has the share 0.5264.
    """
    return NormalDist().inv_cdf(share ** (1 / group_size))


def advice_of(config: Config, speed: Speed, options: PlanOptions) -> str:
    """What limits the run, and what to change."""
    if speed.refresh_s > speed.step_s:
        return (
            f"the weights: {speed.refresh_s:.1f} s to all engines, {speed.step_s:.1f} s a step: use "
            "actors.transport=relay, adapters or a faster link; deltas, which this leaves out, are smaller"
        )
    if config.replay.target_lag == 0:
        return "waiting: learner and actors take turns; raise replay.target_lag to let them overlap"
    enough = math.ceil(speed.num_engines * speed.collect_s / speed.train_s)
    if speed.train_s >= speed.collect_s:
        fewer = f", or use {enough} actors instead of {speed.num_engines}" if enough < speed.num_engines else ""
        times = f"{speed.train_s:.1f} s a step, actors need {speed.collect_s:.1f} s"
        return f"the learner: {times}: raise learner.ranks{fewer}"
    behind = f"the actors: {speed.collect_s:.1f} s for a step's episodes, the learner needs {speed.train_s:.1f} s: "
    if speed.requests_by == "admission":
        return behind + "raise replay.target_lag or replay.groups_per_step: engines have free slots"
    if speed.requests_by == "memory":
        return behind + f"raise actors.tensor_parallel or the memory of the engines, or use {enough} actors"
    if options.env_seconds > speed.episode_s / 2:
        return (
            behind + f"raise actors.max_episodes, as episodes mostly wait for the environment, or use {enough} actors"
        )
    return behind + f"use {enough} actors instead of {speed.num_engines}, or raise actors.max_episodes"


def _requests(
    config: Config, step: MeasuredStep, options: PlanOptions, *, engines: int, tokens: float
) -> tuple[int, str]:
    """The requests of one engine at a time, and what bounds them."""
    replay = config.replay
    open_episodes = replay.group_size * replay.groups_per_step * (replay.target_lag + 1)
    memory = engine_memory(config, step, gpu_bytes=int(GPUS[options.gpu].memory_gib * (1 << 30)))
    bounds = {
        "slots": config.actors.max_episodes,
        "memory": int(memory.num_tokens / tokens),
        "admission": int(open_episodes / engines),
    }
    by = min(bounds, key=lambda name: bounds[name])
    return max(bounds[by], 1), by


def _token_s(config: Config, step: MeasuredStep, options: PlanOptions, *, requests: int, tokens: float) -> float:
    """The time of one iteration, in which every request gets a token; on average half of an episode's tokens are kept.

    All weights are read, also those of experts: among many requests each expert is needed by one.
    """
    kept_bytes = requests * tokens / 2 * step.kv_token_bytes
    num_bytes = ENGINE_DTYPE_BYTES * step.num_base_parameters + kept_bytes
    bandwidth = config.actors.tensor_parallel * GPUS[options.gpu].gbyte_per_s * GIGA * ENGINE_EFFICIENCY
    operations = requests * FORWARD * step.flops_per_token
    return max(num_bytes / bandwidth, operations / _engine_flops(config, options))


def _engine_flops(config: Config, options: PlanOptions) -> float:
    return config.actors.tensor_parallel * GPUS[options.gpu].tflops * TERA * ENGINE_EFFICIENCY


def _operations(step: MeasuredStep, tokens: float) -> float:
    """The operations of training on one sequence; see `slipstream.learner.model.flops`."""
    return step.flops_per_token * tokens + step.flops_per_pair * tokens * (tokens + 1) / 2


def _train_s(config: Config, step: MeasuredStep, options: PlanOptions, *, episodes: int, tokens: float) -> float:
    """The time of a step; activation checkpointing and a reference add a forward pass each."""
    objective = config.objective
    passes = [config.learner.activation_checkpointing, bool(objective.kl_coefficient)]
    operations = episodes * _operations(step, tokens) * (1 + FORWARD * sum(passes))
    return operations / (config.learner.ranks * GPUS[options.gpu].tflops * TERA * LEARNER_EFFICIENCY)


def _transfer_s(config: Config, step: MeasuredStep, options: PlanOptions, *, engines: int) -> float:
    """The way of a whole version: to each engine, or with relays to each host, over the learner's link.

    Actors on the learner's own host copy it there.
    """
    if not options.actor_gpus:
        return step.published_bytes / (HOST_BYTES_PER_S)
    receivers = options.actor_hosts if config.actors.transport == "relay" else engines
    return receivers * step.published_bytes / (options.link_gbit_per_s / 8 * GIGA)


def _dollars_per_hour(config: Config, options: PlanOptions, engines: int) -> float:
    """The learner's GPUs at --gpu-price, and actors at actors.price_per_hour, else at that of their GPUs."""
    actor = config.actors.price_per_hour or config.actors.tensor_parallel * options.gpu_price
    return config.learner.ranks * options.gpu_price + engines * actor
