"""The options of `slipstream collect`: which episodes it plays."""

from dataclasses import dataclass

from slipstream.common.config.env_config import EnvConfig
from slipstream.common.config.setting_bounds import Count, ShareBelow1, Whole, check_bounds
from slipstream.common.process.config_error import require
from slipstream.envhub.catalogue import num_rows, num_train_tasks

DEFAULT_NUM_TASKS = 100
SEARCHES = ("none", "tree_of_thoughts", "dfsdt", "mcts", "graph_of_thoughts")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectOptions:
    num_tasks: Whole = 0  # train tasks to play, in each environment; 0: 100, or all of a file with fewer rows
    first_task: Whole = 0  # index of the first of them
    held_out: bool = False  # play held-out tasks instead, for comparisons: `slipstream fit` refuses their rows
    search: str = "none"  # none plays replay.group_size episodes per task; or tree_of_thoughts, dfsdt, mcts, ...
    width: Count = 3  # actions that a search tries in one state; graph_of_thoughts: attempts in one round
    budget: Count = 60  # dfsdt, mcts, graph_of_thoughts: turns that are generated for one task
    reward_model: str = ""  # guides a search, not dfsdt: a folder of `fit prm` or `export --critic`, or a URL
    completions: Whole = 0  # label each turn with the share of N episodes from there that succeed, for `fit prm`
    server: str = ""  # a file that names a chat server, which plays instead of a model: see docs/collect.md
    expert: bool = False  # the environment's expert plays each task once, instead of the model
    noise: ShareBelow1 = 0.0  # expert: the probability of a random admissible action instead of the expert's
    retrace: str = ""  # expert: a file of rows; each is played again up to a random turn, and the expert finishes it
    mistake: bool = False  # retrace: a random other admissible action comes before the expert's

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        require(
            self.search in SEARCHES,
            "--search",
            f"one of {', '.join(SEARCHES)}",
            self.search,
            "none plays independent episodes",
        )
        require(
            not self.expert or self.search == "none",
            "--search",
            "none with --expert",
            self.search,
            "an expert plays one episode of each task",
        )
        alone = self.search == "none" and not (self.expert or self.completions or self.retrace)
        require(
            not self.server or alone,
            "--server",
            "empty with --search, --expert, --completions and --retrace",
            self.server,
            "a server plays whole episodes",
        )
        require(
            not self.held_out or not (self.completions or self.retrace),
            "--held-out",
            "off with --completions and --retrace",
            self.held_out,
            "these make rows to learn from",
        )
        require(
            not self.reward_model or self.search not in ("none", "dfsdt"),
            "--reward-model",
            "empty without --search tree_of_thoughts, mcts or graph_of_thoughts",
            self.reward_model,
            "it guides a search; `slipstream eval --attempts` chooses among whole episodes",
        )
        require(
            self.completions == 0 or (self.search == "none" and not self.expert),
            "--completions",
            "0 with --search or --expert",
            self.completions,
            "labels are of the policy's own episodes",
        )
        require(self.expert or self.noise == 0, "--noise", "0 without --expert", self.noise, "add --expert")
        require(self.expert or not self.retrace, "--retrace", "empty without --expert", self.retrace, "add --expert")
        require(not (self.retrace and self.noise), "--noise", "0 with --retrace", self.noise, "use --mistake")
        require(not self.mistake or self.retrace != "", "--mistake", "off without --retrace", self.mistake, "add it")

    @property
    def split(self) -> str:
        return "held_out" if self.held_out else "train"

    def known_tasks(self, env: EnvConfig) -> dict[str, int]:
        """How many tasks of the split each environment has, by its label."""
        known = num_train_tasks(env)
        if not self.held_out:
            return known
        return {label: num_rows(entry).get("held_out", known[label]) for label, entry in env.entries().items()}
