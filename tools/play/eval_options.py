"""The options of `slipstream eval`: how often it plays each task, what chooses an attempt, and what it compares."""

from dataclasses import dataclass

from slipstream.common.process.config_error import require
from slipstream.tools.run.collect_options import SEARCHES

MAX_ATTEMPTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    attempts: int = 1  # sampled episodes of each task; from 2 on, pass@k is reported, and how well attempts are chosen
    revise: bool = False  # attempts: show each one to the next, which tries again (sequential revision)
    server: str = ""  # a file that names a chat server, which plays instead of a model: see docs/collect.md
    search: tuple[str, ...] = ()  # searches to compare with sampled episodes on the same tasks, such as mcts,dfsdt
    compare: tuple[str, ...] = ()  # values of env.action_format to compare on the same tasks, with the same model
    reward_model: str = ""  # attempts: a folder of `fit prm` or `fit reward`, or a URL; it chooses one of each task

    def __post_init__(self) -> None:
        require(
            1 <= self.attempts <= MAX_ATTEMPTS, "--attempts", f"1 to {MAX_ATTEMPTS}", self.attempts, "1 is the default"
        )
        for name, given in (("--reward-model", self.reward_model), ("--revise", self.revise)):
            require(
                self.attempts > 1 or not given,
                name,
                "left out without --attempts from 2 on",
                given,
                "it concerns several attempts",
            )
        require(
            set(self.search) <= set(SEARCHES[1:]),
            "--search",
            f"some of {', '.join(SEARCHES[1:])}",
            ",".join(self.search),
            "sampled episodes are played anyway",
        )
        require(
            not self.search or not (self.server or self.compare or self.attempts > 1),
            "--search",
            "empty with --server, --compare and --attempts",
            ",".join(self.search),
            "evaluate them one after the other",
        )
        require(
            not (self.server and self.revise),
            "--server",
            "empty with --revise",
            self.server,
            "a server plays whole episodes",
        )
        require(
            len(set(self.compare)) == len(self.compare) != 1,
            "--compare",
            "two or more different formats",
            ",".join(self.compare),
            "leave it out for env.action_format alone",
        )
