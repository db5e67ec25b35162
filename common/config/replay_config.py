"""What actors sample, and how the buffer hands it to the learner."""

import math
from dataclasses import dataclass

from slipstream.common.process.config_error import require
from slipstream.common.records.kept_sets import MAX_TOP_K

MAX_TREE_SIZE = 16  # attempts: a token that all of them share weighs this much more than one of a single attempt


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    temperature: float = 1.0  # of training episodes
    final_temperature: float = 0.0  # of those of the last step, linearly from `temperature` at the first; 0: the same
    top_p: float = 1.0  # sample from the most likely tokens that have this total probability; 1: off
    top_k: int = 0  # sample from this many most likely tokens, and record them with every token; 0: off
    max_turn_tokens: int = 32  # a generation ends here
    max_thought_tokens: int = 0  # the thought of a reply is closed here, and the answer follows; 0: no limit of its own

    def __post_init__(self) -> None:
        require(
            self.temperature > 0,
            "sampling.temperature",
            "> 0",
            self.temperature,
            "training episodes are sampled; evaluation adds a greedy pass of its own",
        )
        require(
            self.final_temperature >= 0,
            "sampling.final_temperature",
            ">= 0",
            self.final_temperature,
            "0 keeps sampling.temperature for the whole run",
        )
        require(self.max_turn_tokens >= 1, "sampling.max_turn_tokens", ">= 1", self.max_turn_tokens, "try 32")
        require(
            0 <= self.max_thought_tokens < self.max_turn_tokens,
            "sampling.max_thought_tokens",
            f"0, or below sampling.max_turn_tokens = {self.max_turn_tokens}",
            self.max_thought_tokens,
            "an answer follows the thought",
        )
        require(0 < self.top_p <= 1, "sampling.top_p", "in (0, 1]", self.top_p, "1 is off")
        require(
            self.top_k == 0 or 2 <= self.top_k <= MAX_TOP_K,
            "sampling.top_k",
            f"0, or in [2, {MAX_TOP_K}]",
            self.top_k,
            "0 is off; with 1 every token has probability 1, and nothing is learned",
        )
        require(
            self.top_p == 1 or self.top_k > 0,
            "sampling.top_k",
            "> 0 where sampling.top_p is below 1",
            self.top_k,
            "the kept set of every token is recorded, and only top_k bounds its size",
        )

    def temperature_at(self, step: int, *, num_steps: int) -> float:
        """The temperature of the groups that are opened in `step`, from 1 to `num_steps`.

        From 1.2 to 0.6 in 4 steps: 1.2, 1.0, 0.8, 0.6.
        """
        if not self.final_temperature or num_steps == 1:
            return self.temperature
        return self.temperature + (self.final_temperature - self.temperature) * (step - 1) / (num_steps - 1)

    def could_be(self, temperature: float) -> bool:
        """Whether some step of the run has `temperature`."""
        last = self.final_temperature or self.temperature
        return min(self.temperature, last) - 1e-9 <= temperature <= max(self.temperature, last) + 1e-9


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    group_size: int = 8  # sibling attempts at one task
    num_trees: int = 0  # attempts of a group that begin at the start; the others fork from them; 0: all, and no trees
    max_fork_turn: int = 4  # a fork begins after 1 to this many turns, drawn before the group is played
    groups_per_step: int = 8  # groups that one optimizer step consumes
    target_lag: int = 2  # optimizer steps of work that actors may be ahead; 0 is synchronous
    drop_zero_variance: bool = True  # replace groups in which nothing has an advantage; false: train every group
    max_lag: int = 8  # optimizer steps; older tokens are left out of the loss, groups without newer tokens are dropped
    order: str = "oldest"  # which ready groups a step takes: oldest, freshest or uniform
    max_uses: int = 1  # the most steps that learn from one group
    keep_fraction: float = 1.0  # fraction of a step's candidates to keep, those whose returns differ most; others drop
    lease_ttl_s: float = 10.0  # an actor that sends no heartbeat for this long loses its leases
    max_attempts: int = 4  # attempts at a member before its group is dropped
    max_trajectory_bytes: int = 8 << 20  # larger trajectories are refused
    archive: bool = True  # write the data of each step to trajectories/; without it the run cannot be re-run
    compress: bool = False  # send and store trajectories in zstd: about a third of the bytes, for CPU time on both ends

    def __post_init__(self) -> None:
        require(1 <= self.group_size <= 4096, "replay.group_size", "1 to 4096", self.group_size, "8 is the default")
        self._check_trees()
        require(self.groups_per_step >= 1, "replay.groups_per_step", ">= 1", self.groups_per_step, "try 8")
        require(
            0 < self.keep_fraction <= 1, "replay.keep_fraction", "in (0, 1]", self.keep_fraction, "1 keeps every group"
        )
        require(
            self.keep_fraction == 1 or self.max_uses == 1,
            "replay.keep_fraction",
            "1 where replay.max_uses > 1",
            self.keep_fraction,
            "a group that was kept once is not a candidate again",
        )
        require(self.target_lag >= 0, "replay.target_lag", ">= 0", self.target_lag, "use 0 for synchronous training")
        require(self.max_lag >= 0, "replay.max_lag", ">= 0", self.max_lag, "use 0 for synchronous training")
        require(
            self.order in ("oldest", "freshest", "uniform"),
            "replay.order",
            "oldest, freshest or uniform",
            self.order,
            "oldest is the default",
        )
        require(self.max_uses >= 1, "replay.max_uses", ">= 1", self.max_uses, "1 trains each group once")
        require(1 <= self.lease_ttl_s < math.inf, "replay.lease_ttl_s", ">= 1", self.lease_ttl_s, "try 10")
        require(self.max_attempts >= 1, "replay.max_attempts", ">= 1", self.max_attempts, "1 never repeats an attempt")
        require(
            self.max_trajectory_bytes >= 1,
            "replay.max_trajectory_bytes",
            ">= 1",
            self.max_trajectory_bytes,
            "8 MiB is the default",
        )

    def _check_trees(self) -> None:
        """Raise ConfigError unless the trees of a group fit its size."""
        least = max(2, math.ceil(self.group_size / MAX_TREE_SIZE))
        require(
            self.num_trees == 0 or least <= self.num_trees < self.group_size,
            "replay.num_trees",
            f"0, or {least} to replay.group_size - 1 = {self.group_size - 1}",
            self.num_trees,
            f"trees are compared with each other, and have at most {MAX_TREE_SIZE} attempts; 0 is without trees",
        )
        require(self.max_fork_turn >= 1, "replay.max_fork_turn", ">= 1", self.max_fork_turn, "4 is the default")
