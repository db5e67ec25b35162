"""The most important charts of a run, for TensorBoard: those to pin, and those of its "Custom Scalars" tab."""

import json
from urllib.parse import urlencode

# The charts that one looks at first, each with the question that it answers, which TensorBoard shows beside it.
PINNED = {
    "produced/success": "Is it learning? Success of all training episodes that finished since the last step. It rises; "
    "flat with `optim/entropy` near 0: the policy collapsed.",
    "eval/success_sampled": "Is it learning, on tasks that it never trains on? It follows `produced/success`; if it "
    "falls behind, train tasks are memorised.",
    "optim/entropy": "Does it still explore? Nats a token. It declines slowly; at 0 it learns nothing more.",
    "lag/mean": "How stale is the data? Optimizer steps from a trajectory's oldest token to its training. Near "
    "`replay.target_lag`; above, episodes last longer than that many steps.",
    "mismatch/effective_sample_size": "How much does the data still tell about the current policy? Above 0.9; below "
    "0.5 it is too old, or the learning rate too high.",
    "perf/learner_busy": "Which side waits? Near 1: actors wait for the learner. Near 0: the learner waits for actors.",
    "perf/goodput": "What is it worth? Share of the tokens that are trained and not dropped. Above 0.7.",
    "fleet/num_actors": "Is anything failing? Actors that are alive: as many as were started.",
    "fleet/dollars_per_million_tokens": "What does it cost? Dollars for a million trained tokens; only with "
    "`actors.price_per_hour`.",
}

# Title -> regular expressions of the tags that it shows.
OVERVIEW = {
    "Is it learning? Success of all finished episodes, and held-out": [
        r"^produced/success$",
        r"^eval/success_(sampled|greedy)$",
    ],
    "Reward of all finished episodes, and of trained ones": [r"^(produced|trained)/reward$"],
    "Lag, in optimizer steps": [r"^lag/(mean|max|newest_mean)$"],
    "Mismatch KL, in nats a token": [r"^mismatch/kl$"],
    "Effective sample size": [r"^mismatch/effective_sample_size$"],
    "Who waits? 1: actors wait for the learner, 0: the learner waits": [r"^perf/learner_busy$"],
    "Groups in progress": [r"^replay/(queued|leased|ready)$"],
    "Tokens a second": [r"^(fleet/generated|perf/trained)_tokens_per_s$"],
    "Time of each part of a step, in seconds": [
        r"^time/(wait|archive|pack|measure|forward|backward|optimizer|publish|evaluate|record|checkpoint)_s$"
    ],
    "Groups dropped so far": [r"^replay/total_dropped_"],
    "Entropy, in nats": [r"^optim/entropy$"],
    "Gradient norm": [r"^optim/grad_norm$"],
    "Clipped and masked fractions": [r"^optim/(clip_fraction_high|clip_fraction_low|masked_fraction)$"],
    "Fraction of tokens that are trained": [r"^perf/goodput$"],
}


def pinned_link(address: str) -> str:
    """The link that opens the TensorBoard at `address` with the charts of PINNED on top; those without data are absent.

    TensorBoard reads `pinnedCards` from the query when its page loads.
    """
    cards = [{"plugin": "scalars", "tag": tag} for tag in PINNED]
    return f"{address}/?{urlencode({'pinnedCards': json.dumps(cards, separators=(',', ':'))})}#timeseries"
