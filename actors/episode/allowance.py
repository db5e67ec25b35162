"""The limits of an episode, and how its prompts are made."""

from dataclasses import dataclass, field

from slipstream.actors.episode.episode_record import EpisodeRecord
from slipstream.common.config.config import Config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.records.trajectory import StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """What an episode may use up, and how it is played."""

    max_turns: int
    max_tokens: int
    step_timeout_s: float
    episode_timeout_s: float
    model: ModelConfig = field(default_factory=ModelConfig)  # how a conversation becomes prompts
    shows_admissible: bool = False  # whether each prompt lists the admissible actions
    max_thought_tokens: int = 0  # after which a thought is closed; 0: no limit of its own

    @classmethod
    def of(cls, config: Config) -> "Allowance":
        return cls(
            max_turns=config.env.max_turns,
            max_tokens=config.model.max_tokens,
            step_timeout_s=config.env.step_timeout_s,
            episode_timeout_s=config.env.episode_timeout_s,
            model=config.model,
            shows_admissible=config.env.show_admissible,
            max_thought_tokens=config.sampling.max_thought_tokens,
        )

    def spent(self, record: EpisodeRecord) -> StopReason | None:
        """The limit that allows no further turn; None if there is room, and while recorded turns are replayed."""
        if record.is_replaying:
            return None
        if len(record.turns) >= self.max_turns:
            return StopReason.MAX_TURNS
        if len(record.tokens) - record.branch_starts[-1] >= self.max_tokens:
            return StopReason.MAX_TOKENS
        return None
