"""The options of `slipstream collect`: which episodes it plays."""

from dataclasses import dataclass

from slipstream.common.config.env_config import EnvConfig
from slipstream.common.config.setting_bounds import Count, ShareBelow1, Whole
from slipstream.envhub.catalogue import num_rows, num_train_tasks
from slipstream.tools.terminal.options import check_options

DEFAULT_NUM_TASKS = 100
WIDTH, BUDGET = 3, 60
SEARCHES = ("none", "tree_of_thoughts", "dfsdt", "mcts", "graph_of_thoughts")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectOptions:
    num_tasks: Whole = 0  # train tasks to play, in each environment; 0: 100, or all of a file with fewer rows
    first_task: Whole = 0  # index of the first of them
    held_out: bool = False  # play held-out tasks instead, for comparisons: `slipstream fit` refuses their rows
    search: str = "none"  # none plays replay.group_size episodes per task; or tree_of_thoughts, dfsdt, mcts, ...
    width: Count = WIDTH  # actions that a search tries in one state; graph_of_thoughts: attempts in one round
    budget: Count = BUDGET  # dfsdt, mcts, graph_of_thoughts: turns that are generated for one task
    reward_model: str = ""  # guides a search, not dfsdt: a folder of `fit prm` or `export --critic`, or a URL
    completions: Whole = 0  # label each turn with the share of N episodes from there that succeed, for `fit prm`
    server: str = ""  # a file that names a chat server, which plays instead of a model: see docs/collect.md
    expert: bool = False  # the environment's expert plays each task once, instead of the model
    noise: ShareBelow1 = 0.0  # expert: the probability of a random admissible action instead of the expert's

    def __post_init__(self) -> None:
        searches, expert, labels = self.search != "none", self.expert, self.completions > 0
        own = not searches and not expert
        check_options(
            self,
            ("search", self.search in SEARCHES, f"one of {', '.join(SEARCHES)}", "none plays independent episodes"),
            ("search", not (searches and expert), "none with --expert", "an expert plays one episode of each task"),
            ("width", searches or self.width == WIDTH, "left out without --search", "choose a search"),
            (
                "budget",
                self.search not in ("none", "tree_of_thoughts") or self.budget == BUDGET,
                "left out without --search dfsdt, mcts or graph_of_thoughts",
                "choose one of these",
            ),
            (
                "server",
                not self.server or (own and not labels),
                "empty with --search, --expert and --completions",
                "a server plays whole episodes",
            ),
            ("held_out", not (self.held_out and labels), "off with --completions", "it makes rows to learn from"),
            (
                "reward_model",
                not self.reward_model or self.search not in ("none", "dfsdt"),
                "empty without --search tree_of_thoughts, mcts or graph_of_thoughts",
                "it guides a search; `slipstream eval --attempts` chooses among whole episodes",
            ),
            (
                "completions",
                own or not labels,
                "0 with --search or --expert",
                "labels are of the policy's own episodes",
            ),
            ("noise", expert or self.noise == 0, "0 without --expert", "add --expert"),
        )

    @property
    def split(self) -> str:
        return "held_out" if self.held_out else "train"

    def known_tasks(self, env: EnvConfig) -> dict[str, int]:
        """How many tasks of the split each environment has, by its label."""
        known = num_train_tasks(env)
        if not self.held_out:
            return known
        return {label: num_rows(entry).get("held_out", known[label]) for label, entry in env.entries().items()}
