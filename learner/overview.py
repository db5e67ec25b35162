"""The most important charts of a run, for TensorBoard's "Custom Scalars" tab."""

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
