"""What actors sample, and how the buffer hands it to the learner."""

import math
import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from slipstream.common.config.setting_bounds import AtLeast1, Count, Positive, PositiveShare, Whole, check_bounds
from slipstream.common.process.config_error import require
from slipstream.common.records.kept_sets import MAX_TOP_K

SEARCHES = ("mcts", "dfsdt", "tree_of_thoughts")  # that choose forks by the returns of attempts that have ended
MAX_TREE_SIZE = 16  # attempts: a token that all of them share weighs this much more than one of a single attempt


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    temperature: Positive = 1.0  # of training episodes
    top_p: PositiveShare = 1.0  # sample from the most likely tokens that have this total probability; 1: off
    top_k: int = 0  # sample from this many most likely tokens, and record them with every token; 0: off
    max_turn_tokens: Count = 32  # a generation ends here
    max_thought_tokens: int = 0  # the thought of a reply is closed here, and the answer follows; 0: no limit of its own

    def __post_init__(self) -> None:
        check_bounds(self, "sampling.")
        require(
            0 <= self.max_thought_tokens < self.max_turn_tokens,
            "sampling.max_thought_tokens",
            f"0, or below sampling.max_turn_tokens = {self.max_turn_tokens}",
            self.max_thought_tokens,
            "an answer follows the thought",
        )
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


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    group_size: Annotated[int, Interval(ge=1, le=4096)] = 8  # sibling attempts at one task
    trees: str = ""  # random:4, mcts:2, ...: how attempts of a group fork, and how many begin at the start; empty: none
    groups_per_step: Count = 8  # groups that one optimizer step consumes
    target_lag: Whole = 2  # optimizer steps of work that actors may be ahead; 0 is synchronous
    drop_zero_variance: bool = True  # replace groups in which nothing has an advantage; false: train every group
    max_lag: Whole = 8  # optimizer steps; older tokens are left out of the loss, groups without newer ones are dropped
    max_uses: Count = 1  # the most steps that learn from one group
    keep_fraction: PositiveShare = 1.0  # share of a step's candidates to keep, those whose returns differ most
    lease_ttl_s: AtLeast1 = 10.0  # an actor that sends no heartbeat for this long loses its leases
    max_attempts: Count = 4  # attempts at a member before its group is dropped
    archive: bool = True  # write the data of each step to trajectories/; without it the run cannot be re-run
    compress: bool = False  # send and store trajectories in zstd: about a third of the bytes, for CPU time on both ends

    def __post_init__(self) -> None:
        check_bounds(self, "replay.")
        self._check_trees()
        require(
            self.keep_fraction == 1 or self.max_uses == 1,
            "replay.keep_fraction",
            "1 where replay.max_uses > 1",
            self.keep_fraction,
            "a group that was kept once is not a candidate again",
        )

    @property
    def num_trees(self) -> int:
        """The attempts of a group that begin at the start, while others may fork from them; 0: all, and none forks."""
        return int(self.trees.partition(":")[2] or 0)

    @property
    def search(self) -> str:
        """The search that chooses where attempts fork; empty: they fork at random, or not at all."""
        return self.trees.partition(":")[0].removeprefix("random")

    def _check_trees(self) -> None:
        """Raise ConfigError unless the trees of a group are known, and fit its size."""
        kind = self.trees.partition(":")[0]
        require(
            re.fullmatch(f"((random|{'|'.join(SEARCHES)}):[0-9]{{1,4}})?", self.trees) is not None,
            "replay.trees",
            f"empty, or N trees as {':N, '.join(('random', *SEARCHES))}:N",
            self.trees,
            "an attempt that is shown earlier ones has another prompt, so it is no sibling of theirs: use `slipstream "
            "collect --search graph_of_thoughts`"
            if kind == "graph_of_thoughts"
            else "random:2 is two attempts from the start, and forks at random turns",
        )
        least = max(2, math.ceil(self.group_size / MAX_TREE_SIZE))
        require(
            not self.trees or least <= self.num_trees < self.group_size,
            "replay.trees",
            f"empty, or {kind}:N with N from {least} to replay.group_size - 1 = {self.group_size - 1}",
            self.trees,
            f"trees are compared with each other, and have at most {MAX_TREE_SIZE} attempts; empty is without trees",
        )
