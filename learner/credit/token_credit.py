"""What an algorithm gives to the sampled tokens of an episode."""

from dataclasses import dataclass

from slipstream.learner.credit.token_rewards import Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCredit:
    """Numbers for each sampled token of an episode, in order."""

    advantages: Numbers
    returns: Numbers | None = None  # the critic's targets; None without a critic
    trained_from: int = 0  # the token of the episode before which no token is trained: a sibling trains those
