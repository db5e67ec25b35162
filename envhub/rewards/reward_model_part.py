"""The part `reward_model`: values of a reward model that `slipstream serve rewards` serves."""

from dataclasses import dataclass
from itertools import pairwise

from slipstream.common.records.reward_protocol import CRITICS, PROCESS
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.episode import Episode, Values
from slipstream.envhub.rewards.reward_client import DEADLINE_S, RewardClient


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRewardModel:
    """A reward model behind a URL."""

    client: RewardClient

    async def __call__(self, episode: Episode) -> Values:
        """Return the score of a model of outcome; of the process, how much each turn changes the probability.

        Raises EnvError if the server gives no values within the deadline, or serves a critic.
        """
        if episode.scored is None:
            raise EnvError("a reward model reads tokens, and there are only texts")
        reply = await self.client.values(episode.scored)
        if reply.kind in CRITICS:
            raise EnvError(
                f"{self.client.url} serves a critic, whose values are no rewards; serve a model of `slipstream fit "
                "reward` or `slipstream fit prm`"
            )
        if reply.kind != PROCESS:
            return reply.values[0]
        return [after - before for before, after in pairwise([0.0, *reply.values])]


def reward_model(*, url: str, deadline_s: float = DEADLINE_S) -> ServedRewardModel:
    """Make the part. Raises ValueError for an address, or a deadline, that cannot be one."""
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s < float("inf"):
        raise ValueError(f"deadline_s must be above 0, got {deadline_s!r}; leave it out for {DEADLINE_S:g}")
    return ServedRewardModel(client=RewardClient(url=url, deadline_s=float(deadline_s)))
