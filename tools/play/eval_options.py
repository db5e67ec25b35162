"""The options of `slipstream eval`: how often it plays each task, what chooses an attempt, and what it compares."""

from dataclasses import dataclass

from slipstream.tools.run.collect_options import SEARCHES
from slipstream.tools.terminal.options import check_options

MAX_ATTEMPTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    attempts: int = 1  # sampled episodes of each task; from 2 on, pass@k is reported, and how well attempts are chosen
    server: str = ""  # a file that names a chat server, which plays instead of a model: see docs/collect.md
    search: tuple[str, ...] = ()  # searches to compare with sampled episodes on the same tasks, such as mcts,dfsdt
    compare: tuple[str, ...] = ()  # values of env.action_format to compare on the same tasks, with the same model
    reward_model: str = ""  # attempts: a folder of `fit prm` or `fit reward`, or a URL; it chooses one of each task

    def __post_init__(self) -> None:
        several = self.attempts > 1
        searches = ", ".join(SEARCHES[1:])
        check_options(
            self,
            ("attempts", 1 <= self.attempts <= MAX_ATTEMPTS, f"1 to {MAX_ATTEMPTS}", "1 is the default"),
            (
                "reward_model",
                several or not self.reward_model,
                "left out without --attempts from 2 on",
                "it chooses among attempts",
            ),
            ("search", {*self.search} <= {*SEARCHES[1:]}, f"some of {searches}", "sampled episodes are played anyway"),
            (
                "search",
                not self.search or not (self.server or self.compare or several),
                "empty with --server, --compare and --attempts",
                "evaluate them one after the other",
            ),
            (
                "compare",
                len(set(self.compare)) == len(self.compare) != 1,
                "two or more different formats",
                "leave it out for env.action_format alone",
            ),
        )
